"""Rounds of layers that are added to a store which knows their profiles; all lines here are made up."""

import dataclasses
from pathlib import Path

import pytest

from bench.cpu.lines import Measured, Started, write_lines
from bench.gpu.layer_records import comparisons, main
from mucudnn.profile import Environment, Trial
from mucudnn.store import SqliteStore
from tests.bench.gpu_layer_lines import FIRST, HALVES, OWN, SECOND, started
from tests.examples import a_record, an_environment

ELSEWHERE = Started("tf32-nchw", an_environment())


def in_other_rounds(line: Measured) -> Measured:
    """The same line, of which fewer were proved than had competed."""
    spans = {key: each for key, each in line.proving.spans_ns.items() if key != HALVES}
    return dataclasses.replace(line, proving=dataclasses.replace(line.proving, spans_ns=spans, others=0.5))


LINE = in_other_rounds(FIRST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of two layers, packed, as they are many lines."""
    lines = [started(), ELSEWHERE, *[LINE] * 1000, in_other_rounds(SECOND)]
    (tmp_path / "results").mkdir()
    write_lines(tmp_path / "results/layers.jsonl", lines)
    assert (tmp_path / "results/layers.jsonl.gz").exists()
    return tmp_path / "results"


def a_store(path: Path, environment: Environment, line: Measured, whole: bool = True) -> Path:
    """A store with a record of a layer, alone or as a part of a larger mini-batch."""
    with SqliteStore(path) as store:
        store.add_records(environment, [a_record(Trial(line.problem, "cudnn:eng1", whole))])
    return path


def test_rounds_tell_who_disturbed_them_as_far_as_that_is_known() -> None:
    proving, deciding = comparisons(LINE)
    assert (proving.others, deciding.others) == (0.5, 0.0)


def test_rounds_of_a_folder_are_added_once_to_a_store_that_knows_the_layers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = started().environment
    path = a_store(tmp_path / "store", environment, LINE)

    assert main([str(folder), str(path)]) == main([str(folder), str(path)]) == 0

    told = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert told == ["2.", "0."]
    with SqliteStore(path, read_only=True) as store:
        proving, deciding = store.comparisons_of(environment, LINE.problem)
    assert deciding.times.keys() == LINE.deciding.spans_ns.keys()
    assert proving.times.keys() == deciding.times.keys() - {HALVES}
    assert proving.times[OWN].spans_ns == LINE.proving.spans_ns[OWN]


@pytest.mark.parametrize(("batch", "whole"), [(16, True), (8, False)])
def test_a_layer_of_which_the_store_has_no_profile_is_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: int, whole: bool
) -> None:
    other = dataclasses.replace(LINE, problem=dataclasses.replace(LINE.problem, batch=batch))
    path = a_store(tmp_path / "store", started().environment, other, whole=whole)

    assert main([str(folder), str(path)]) == 0

    assert capsys.readouterr().out.endswith(": 0.\n")


def test_a_store_of_another_environment_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_store(tmp_path / "store", an_environment(backend="other"), LINE)

    assert main([str(folder), str(path)]) == 1

    told = "must hold profiles of the environment of the lines, but has none of float32-nchw, tf32-nchw."
    assert told in capsys.readouterr().err


def test_no_store_and_no_lines_are_refused_and_nothing_is_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), str(tmp_path / "new")]) == 1
    assert "new must hold profiles, but there is no such file." in capsys.readouterr().err
    assert main([str(tmp_path), str(a_store(tmp_path / "store", an_environment(), LINE))]) == 1
    assert f"{tmp_path} must have lines of layers, but has none." in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
