"""Native export: a patched model written as a stock architecture that computes the same function."""

from hf_posenc.export.route import Route, known_types, ranked, register_route, routes
from hf_posenc.export.writing import Export, export_native

__all__ = ["Export", "Route", "export_native", "known_types", "ranked", "register_route", "routes"]
