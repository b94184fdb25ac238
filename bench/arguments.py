"""What the programs' options may be."""

import argparse
import math
from pathlib import Path

from mucudnn.errors import SizeError
from mucudnn.files import is_there
from mucudnn.sizes import parse_bytes


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


def seconds(text: str) -> float:
    """Return a number of seconds, which may be without an end.

    Raises:
        argparse.ArgumentTypeError: it is "nan".
        ValueError: it is no number.
    """
    number = float(text)
    if math.isnan(number):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, but got {text}")
    return number


def size(text: str) -> int:
    """Return the bytes that a text such as "16MiB" names.

    Raises:
        argparse.ArgumentTypeError: it names none.
    """
    try:
        return parse_bytes(text)
    except SizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def plan_file(text: str) -> Path:
    """Return where a plan is to be written, with a page beside it of the same name that ends with .html.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or the page's own name, or may not be looked for.
    """
    path = Path(text)
    try:
        is_folder = is_there(path) and path.is_dir()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be used: {error.strerror}") from error
    if is_folder:
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if path.with_suffix(".html") == path:
        raise argparse.ArgumentTypeError(f"{text} is where the plan is drawn; call the plan otherwise")
    return path
