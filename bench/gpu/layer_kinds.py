"""What the kinds of divisions are called that are compared beside the fastest of all, and how cases end."""

UNDIVIDED = "undivided"
"""Any algorithm for the whole mini-batch at once."""

IN_PARTS = "own in parts"
"""PyTorch's own convolution of micro-batches, never of the whole mini-batch."""

UNTILED = "without tiles"
"""cuDNN's engines and PyTorch's own: all but the algorithms that cuDNN lacks."""

CLIFFS = "cliffs/"
"""How the names of layers begin of which it was reported that PyTorch is slow."""

ASKED = "cases"
"""What a run calls the number of cases that it was asked for in a setting."""

ENDED = "its process ended."
"""The reason of a case that has begun, until it has another."""

STOPPED = "it was interrupted."
"""The reason of a case that is measured by the next run after all."""


def with_status(status: int) -> str:
    """Return the reason of a case in which its process ended with a status."""
    return f"{ENDED[:-1]} with status {status}."


def is_end(reason: str) -> bool:
    """Whether a process ended in a case, whatever is known of that."""
    return reason.startswith(ENDED[:-1])
