"""`python -m bench.gpu.available`: whether there is a GPU; it needs nothing but Python."""

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


if __name__ == "__main__":
    sys.exit(obstacle())
