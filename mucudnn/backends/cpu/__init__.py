"""The processor: PyTorch's own convolution and algorithms made of its operations, weighed in a child."""
