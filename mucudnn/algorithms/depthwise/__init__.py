"""Depthwise convolution in C: each channel by itself, with as many channels at a time as a vector holds."""

from mucudnn.algorithms.depthwise.algorithm import DepthwiseAlgorithm

__all__ = ["DepthwiseAlgorithm"]
