"""Public models, divided, beside unpatched twins: the same after three steps of training."""
