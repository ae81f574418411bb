"""Plots of length and position curves, legible in print, in grey and to the colour-blind; each as PNG and as SVG."""

from hf_posenc.plots.canvas import COLOURS, GREY, STYLE, save
from hf_posenc.plots.effective import plot_effective_lengths
from hf_posenc.plots.lengths import plot_lengths
from hf_posenc.plots.positions import plot_positions
from hf_posenc.plots.quantities import BITS_PER_BYTE, GAIN, PERPLEXITY, RATIO, Quantity

__all__ = [
    "BITS_PER_BYTE",
    "COLOURS",
    "GAIN",
    "GREY",
    "PERPLEXITY",
    "RATIO",
    "STYLE",
    "Quantity",
    "plot_effective_lengths",
    "plot_lengths",
    "plot_positions",
    "save",
]
