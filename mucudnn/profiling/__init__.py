"""What is known of a problem's algorithms and divisions, and who is asked for more: without torch."""
