"""What programs refuse before they begin."""

import argparse
import math
from pathlib import Path

import pytest

from bench.arguments import plan_file, seconds


def test_seconds_may_have_no_end_but_are_numbers() -> None:
    assert seconds("1.5") == 1.5
    assert seconds("inf") == math.inf
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number of seconds, but got nan"):
        seconds("nan")


def test_a_plan_is_no_folder_and_lies_beside_its_page(tmp_path: Path) -> None:
    assert plan_file(str(tmp_path / "plan.json")) == tmp_path / "plan.json"
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be used: File name too long"):
        plan_file("x" * 300)
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder"):
        plan_file(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="is where the plan is drawn"):
        plan_file(str(tmp_path / "plan.html"))
