"""Convolution algorithms composed of torch operations: written once, at home on every torch device."""

from mucudnn.algorithms.base import Algorithm, GradientSum, SliceKernel, SumKernel
from mucudnn.algorithms.columns import ColumnAlgorithm
from mucudnn.algorithms.tiles import TileAlgorithm

ALGORITHMS: tuple[Algorithm, ...] = (
    ColumnAlgorithm(),
    TileAlgorithm("winograd2", outputs=2, least_taps=2, most_taps=3),
    TileAlgorithm("winograd4", outputs=4, least_taps=3, most_taps=5),
    TileAlgorithm("fft16", inputs=16, least_taps=5, most_taps=15),
    TileAlgorithm("fft32", inputs=32, least_taps=9, most_taps=31),
)
"""All of them, in the order in which they are offered."""

REVISION = 1
"""Raised whenever an algorithm changes in a way that makes its recorded times or errors worthless."""

__all__ = ["ALGORITHMS", "REVISION", "Algorithm", "GradientSum", "SliceKernel", "SumKernel"]
