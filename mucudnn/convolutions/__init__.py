"""Convolutions as PyTorch calls them: what a call asks for, modules, why calls are left as they are."""
