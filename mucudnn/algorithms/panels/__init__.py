"""Convolution by filters of one tap in C: products of matrices, of which one is packed into panels."""

from mucudnn.algorithms.panels.algorithm import PanelAlgorithm

__all__ = ["PanelAlgorithm"]
