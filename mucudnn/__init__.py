"""Micro-batching convolution autotuner for PyTorch."""

__version__ = "0.1.0"
