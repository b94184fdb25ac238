"""How a result tells by what it was computed."""

from torch import Tensor


def is_divided(result: Tensor) -> bool:
    """Whether a convolution of ours stands in the graph that has computed `result`."""
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == "_ConvolutionBackward":
            return True
        waiting += [each for each, _ in ([] if node is None else node.next_functions)]
    return False
