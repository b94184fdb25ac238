"""Where it is worth trying products by panels."""

from collections.abc import Iterator

from mucudnn.algorithms.compiled.compiler import WIDE_BYTES, compiler
from mucudnn.algorithms.libraries import has_narrow_products
from mucudnn.algorithms.panels.algorithm import PanelAlgorithm
from mucudnn.problem import ConvProblem


def likely(problem: ConvProblem, threads: int, exhaustive: bool) -> Iterator[PanelAlgorithm]:
    """Yield the one that runs on so many threads, if it computes the problem and may win.

    That is where BLAS does not use the whole vectors of a processor: there PyTorch's own took 1.5 to 3 times
    as long for 1x1 layers of ResNet-50 on one thread, all three ops in both layouts.

    Args:
        problem: of the micro-batch.
        threads: that compute.
        exhaustive: whether to try it wherever vectors are as wide.
    """
    found, each = compiler(), PanelAlgorithm(threads)
    is_wide = found is not None and found.vector_bytes >= WIDE_BYTES
    if is_wide and (exhaustive or has_narrow_products()) and each.refusal(problem) is None:
        yield each
