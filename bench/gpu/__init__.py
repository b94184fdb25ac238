"""What only a machine with an NVIDIA GPU can answer: measured by one command, kept as files."""
