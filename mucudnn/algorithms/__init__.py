"""Convolution algorithms: composed of torch operations, at home on every torch device, or compiled from C."""

from mucudnn.algorithms.base import Algorithm, GradientSum, SliceKernel, SumKernel
from mucudnn.algorithms.choice import named, offered

REVISION = 9
"""Raised whenever an algorithm changes in a way that makes its recorded times or errors worthless."""

__all__ = ["REVISION", "Algorithm", "GradientSum", "SliceKernel", "SumKernel", "named", "offered"]
