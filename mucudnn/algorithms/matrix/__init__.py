"""Convolution of float32 by a processor's matrix unit, in C, which multiplies numbers of 16 bits."""

from mucudnn.algorithms.matrix.algorithm import MatrixAlgorithm

__all__ = ["MatrixAlgorithm"]
