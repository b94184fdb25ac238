"""What the kinds of divisions are called that are compared beside the fastest of all."""

UNDIVIDED = "undivided"
"""Any algorithm for the whole mini-batch at once."""

IN_PARTS = "own in parts"
"""PyTorch's own convolution of micro-batches, never of the whole mini-batch."""

UNTILED = "without tiles"
"""cuDNN's engines and PyTorch's own: all but the algorithms that cuDNN lacks."""
