"""What programs say when they end."""

from pathlib import Path

import pytest

from bench.endings import not_told_anew


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "here/lines"),
            "here/lines: No such file or directory",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("A line must be whole."), "A line must be whole"),
        (EOFError(), "EOFError()"),
        (KeyError("time"), "KeyError('time')"),
    ],
)
def test_why_no_summary_could_be_written_is_told_in_words(error: Exception, reason: str) -> None:
    assert not_told_anew(Path("here"), error) == f"here cannot be told anew: {reason}."
