"""What the programs' options may be."""

import argparse


def at_least_one(text: str) -> int:
    """Return a whole number that is positive.

    Raises:
        argparse.ArgumentTypeError: it is 0 or negative.
        ValueError: it is no whole number.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {number}")
    return number
