"""Results for readers: JSON that holds everything, a table for the terminal, plots, and a page.

Tables, plots and pages are made from curves or from the JSON they were written to, never from numbers typed by hand.
"""

from hf_posenc.report.comparability import Panel, by_protocol, check_comparable, panels
from hf_posenc.report.files import PLOT_NAME, RESULT_NAME, TABLE_NAME, check_output, result_header, write_result
from hf_posenc.report.table import Grid, describe_protocol, length_grid, length_table
from hf_posenc.report.writing import read_curves, write_report

__all__ = [
    "PLOT_NAME",
    "RESULT_NAME",
    "TABLE_NAME",
    "Grid",
    "Panel",
    "by_protocol",
    "check_comparable",
    "check_output",
    "describe_protocol",
    "length_grid",
    "length_table",
    "panels",
    "read_curves",
    "result_header",
    "write_report",
    "write_result",
]
