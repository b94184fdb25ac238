"""Convolution by tiles in C, which the C compiler of this machine compiles when it is first needed."""

from mucudnn.algorithms.compiled.compiler import description
from mucudnn.algorithms.compiled.tiles import CompiledTiles

__all__ = ["CompiledTiles", "description"]
