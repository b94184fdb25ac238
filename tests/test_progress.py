"""Who is told how far long work has come, and how."""

import io
import re
import sys

import pytest

from mucudnn.progress import Bar, Lines, Silence, Work, progress_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Shows the seconds that it is set to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def notebook_stream() -> io.StringIO:
    """Standard error as IPython's kernel has it: no terminal, and shown below a cell."""
    return type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()


def told_lines(steps: list[tuple[float, float]]) -> list[str]:
    """What is told of work of 200 that is so far at such seconds; the last step is its end."""
    clock, stream = Clock(), io.StringIO()
    lines = Lines(stream, clock, every_s=10.0)
    clock.now_s = 1000.0
    lines.begin(200.0)
    for seconds, done in steps[:-1]:
        clock.now_s = 1000.0 + seconds
        lines.at(f"at {seconds:.0f}", done)
    clock.now_s = 1000.0 + steps[-1][0]
    lines.end(7)
    return stream.getvalue().splitlines()


def test_a_line_comes_when_ten_seconds_have_passed_since_the_last() -> None:
    told = told_lines([(1, 2), (10, 50), (19, 60), (20, 100), (25, 150), (27, 200)])

    assert told == [
        "mucudnn: 25% after 10 s, at 10",
        "mucudnn: 50% after 20 s, at 20",
        "mucudnn: done after 27 s, 7 measured",
    ]


def test_short_work_says_nothing() -> None:
    assert told_lines([(1, 2), (9, 200), (9.5, 200)]) == []


@pytest.mark.parametrize(
    ("wish", "stream", "kind"),
    [
        (None, Terminal(), Bar),
        (True, Terminal(), Bar),
        (False, Terminal(), Silence),
        (None, notebook_stream(), Lines),
        (True, notebook_stream(), Lines),
        (False, notebook_stream(), Silence),
        (None, io.StringIO(), Silence),
        (True, io.StringIO(), Lines),
        (False, io.StringIO(), Silence),
    ],
)
def test_a_bar_is_for_terminals_and_lines_are_for_notebooks_and_those_who_ask(
    wish: bool | None, stream: io.StringIO, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)

    with progress_for(wish) as shown:
        assert type(shown) is kind


class Tee:
    """Writes, and does nothing else that a stream does."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), Tee()], ids=["none", "closed", "tee"])
@pytest.mark.parametrize(("wish", "kind"), [(None, Silence), (True, Lines)])
def test_standard_error_that_is_no_stream_is_no_terminal(
    stream: object, wish: bool | None, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)

    with progress_for(wish) as shown:
        assert type(shown) is kind


def test_lines_go_to_whatever_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Tee())

    with progress_for(wish=True) as shown:
        assert isinstance(shown, Lines)
        shown._every_s = 0.0
        shown.begin(4.0)
        shown.at("conv1", 1.0)

    assert sys.stderr.written == "mucudnn: 25% after 0 s, conv1\n"


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_standard_error_may_be_closed_while_work_goes_on(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = stream()
    monkeypatch.setattr(sys, "stderr", opened)

    with progress_for(wish=True) as shown:
        if isinstance(shown, Lines):
            shown._every_s = 0.0
        shown.begin(4.0)
        opened.close()
        shown.at("conv1", 1.0)
        shown.end(1)


def test_a_listener_of_the_users_own_is_told() -> None:
    own = Silence()

    with progress_for(own) as shown:
        assert shown is own


class Noting:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def begin(self, work: float) -> None:
        self.told.append(("begin", work))

    def at(self, what: str, done: float) -> None:
        self.told.append((what, done))

    def end(self, measured: int) -> None:
        self.told.append(("end", measured))


def test_a_step_counts_once_however_often_it_is_met() -> None:
    noting = Noting()
    work = Work(noting, {"a": 1.0, "b": 2.0, "c": 4.0})

    work.finish("a")
    work.at("b")
    work.finish("b", "a", "unknown")
    work.at("c")
    work.end(5)

    assert noting.told == [("begin", 7.0), ("b", 1.0), ("c", 3.0), ("end", 5)]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_bar_tells_how_far_it_is_however_narrow_the_terminal_is(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")

    with progress_for(wish=True) as shown:
        shown.begin(10.0)
        shown.at("confirming fprop 64x3x224x224 -> 64, kernel 7x7, stride 2x2, padding 3x3, float32", 3.0)

    shown_text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert " 30% -:--:-- left, confirming fp" in shown_text


def test_a_bar_shows_brackets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")

    with progress_for(wish=True) as shown:
        shown.begin(10.0)
        shown.at("confirming [/x].[bold]conv", 3.0)

    assert "confirming [/x].[bold]conv" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def test_what_a_stream_cannot_encode_is_written_in_other_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii", write_through=True))

    with progress_for(wish=True) as shown:
        assert isinstance(shown, Lines)
        shown._every_s = 0.0
        shown.begin(4.0)
        shown.at("1×1", 1.0)

    assert written.getvalue() == b"mucudnn: 25% after 0 s, 1?1\n"
