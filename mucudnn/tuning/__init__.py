"""One run of the tuner, from what a user asks to a plan, on one rank or on all."""
