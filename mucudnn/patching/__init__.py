"""Making a model's convolutions run as a plan has them, in eager mode and in graphs, and taking that back."""
