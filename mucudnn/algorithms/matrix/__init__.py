"""Convolution by a processor's matrix unit, in C: of bfloat16, which it multiplies, and of sums of them."""

from mucudnn.algorithms.matrix.algorithm import MatrixAlgorithm

__all__ = ["MatrixAlgorithm"]
