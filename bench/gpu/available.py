"""`python -m bench.gpu.available`: whether there is a GPU that computes; it needs nothing but Python."""

import sys


def obstacle() -> str | None:
    """Return why nothing can be measured here, in one sentence; None if there is a GPU."""
    try:
        import torch  # not before it is needed: without it, there is a sentence to be said
    except ImportError:
        return f"make gpu needs a CUDA build of torch, but {sys.executable} has no torch."
    if torch.cuda.is_available():
        return None
    return f"make gpu needs an NVIDIA GPU, but torch {torch.__version__} sees none."


def fault() -> str | None:
    """Return why the GPU does not compute, in one sentence; None if it does.

    That also has its libraries read from the disk, for which the first of the tests would wait.
    """
    import torch

    try:
        image, weight = (
            torch.ones(size, device="cuda", requires_grad=True) for size in ((2, 8, 8, 8), (8, 8, 3, 3))
        )
        torch.nn.functional.conv2d(image, weight).flatten(1).mm(
            torch.ones(288, 8, device="cuda")
        ).sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return f"The GPU must compute a convolution, but torch says: {reason}"
    return None


if __name__ == "__main__":
    sys.exit(obstacle() or fault())
