"""cuDNN 9 by its graph API: which of its engines compute a problem, with what workspace."""
