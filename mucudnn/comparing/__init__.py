"""A program's own step with a plan and without, in turns, and what to do about it."""
