"""Layers of convolutional networks on the processor, against PyTorch's own (`make bench-cpu`)."""
