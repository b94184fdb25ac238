"""One run of the tuner, from what a user asks to a plan, and what is tuned when it is first met."""
