"""What a folder of results holds already is not shown again, and what an earlier call has found is kept."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.cpu import lines
from bench.cpu.lines import Case, Failed, Started, append, read_packed_too
from bench.gpu import rest, step_lines
from bench.gpu.rest import ERRANDS, Errand, unshown
from bench.gpu.rest_results import Held, take_up
from bench.record import PACKED, STORE
from mucudnn.problem import ConvOp, Layout
from mucudnn.profile import Environment
from mucudnn.store import SqliteStore
from tests.examples import a_record, an_environment

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "nvidia-h200"

CASE = Case("tf32-nhwc", "made-up/layer", Layout.CHANNELS_LAST, ConvOp.FPROP)

A_ROW = {
    "network": "vgg16 64x3x224x224", "setting": "float32-nchw", "limit_bytes": 2**26, "losses": [], "time": {
        "median_us": 1.0, "low_us": None, "high_us": None, "samples": 1, "calls": 1, "converged": False,
        "spans_ns": [1000],
    },
}  # fmt: skip

WAYS = ("its equal", "its equal, in another thread", "divided, in a graph")

A_TRIAL = [{"date": "2026-01-01"}, *({**A_ROW, "way": way} for way in WAYS)]


@pytest.fixture(scope="module", autouse=True)
def lines_decoded_once() -> Iterator[None]:
    """Nearly every test reads the H200's results, thousands of lines: equal texts are equal lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_from_text", functools.cache(lines._from_text))
        yield


@pytest.fixture(scope="module")
def taken_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "of a card"
    take_up(RESULTS, folder)
    return folder


@pytest.fixture(scope="module")
def held() -> Held:
    """What the H200's results hold, which is read once."""
    return Held(RESULTS)


@pytest.fixture(scope="module")
def environment() -> Environment:
    """In which they were measured."""
    known = read_packed_too(RESULTS / "layers.jsonl")
    return next(line.environment for line in known if isinstance(line, Started))


def test_a_new_folder_has_all_that_is_known(taken_up: Path) -> None:
    assert read_packed_too(taken_up / "layers.jsonl") == read_packed_too(RESULTS / "layers.jsonl")
    assert step_lines.read(taken_up / step_lines.LINES) == step_lines.read(RESULTS / step_lines.LINES)


def test_what_was_added_since_stays_and_what_is_known_is_not_added_twice(taken_up: Path) -> None:
    known, trials = read_packed_too(RESULTS / "layers.jsonl"), step_lines.known(RESULTS)
    append(taken_up / "layers.jsonl", Failed(CASE, "it is made up."))
    with (taken_up / step_lines.LINES).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in A_TRIAL)
    count = len((taken_up / step_lines.LINES).read_text().splitlines())

    for _ in range(2):
        take_up(RESULTS, taken_up)

    assert read_packed_too(taken_up / "layers.jsonl") == [*known, Failed(CASE, "it is made up.")]
    assert step_lines.known(taken_up) - trials == {("vgg16 64x3x224x224", "float32-nchw", 2**26)}
    assert len((taken_up / step_lines.LINES).read_text().splitlines()) == count


def test_what_others_have_found_meanwhile_is_added_and_what_both_have_is_not(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, reasons in ((one, ("first", "common")), (two, ("common", "second"))):
        folder.mkdir()
        for reason in reasons:
            append(folder / "layers-all.jsonl", Failed(CASE, reason))
        texts = [json.dumps({"date": reason}) + "\n" for reason in reasons]
        (folder / step_lines.LINES).write_text("".join(texts), encoding="utf-8")

    take_up(two, one)

    assert read_packed_too(one / "layers-all.jsonl") == [
        Failed(CASE, reason) for reason in ("first", "common", "second")
    ]
    assert (
        one / step_lines.LINES
    ).read_text() == '{"date": "first"}\n{"date": "common"}\n{"date": "second"}\n'


def test_errands_of_which_all_is_known_are_left_out(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    left = unshown(ERRANDS, held)

    shown = {each.about for each in ERRANDS} - {each.about for each in left}
    assert "DeepBench's list in TF32, channels_last" in shown
    assert left == [each for each in ERRANDS if each.about not in shown]
    assert "training steps of resnet18, bfloat16-nhwc, 8MiB" in {each.about for each in left}  # no controls
    assert len(left) > 3
    assert capsys.readouterr().out.count("Known: ") == len(shown)


def test_of_a_card_without_results_nothing_is_known(tmp_path: Path) -> None:
    assert unshown(ERRANDS, Held(tmp_path)) == list(ERRANDS)


def test_an_errand_is_left_until_all_of_it_is_known(held: Held, tmp_path: Path) -> None:
    append(tmp_path / "layers.jsonl", Failed(CASE, "it is made up."))

    assert unshown(ERRANDS, Held(tmp_path)) == list(ERRANDS)
    assert ERRANDS[1] not in unshown(ERRANDS, held)


def on_a_card(monkeypatch: pytest.MonkeyPatch, kept: Path, then: Environment, **software: str) -> None:
    """Have it begin on the H200 that the results are of, with those libraries or other ones."""
    present = dataclasses.replace(then, software={**then.software, **software})
    monkeypatch.setattr(rest, "obstacle", lambda: None)
    monkeypatch.setattr(rest, "seed", lambda *_: [])
    monkeypatch.setattr(rest, "_KEPT", kept)
    monkeypatch.setattr(rest, "present_environment", lambda: present)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")


def test_what_was_measured_with_other_libraries_is_measured_anew(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun: list[list[Errand]] = []
    on_a_card(monkeypatch, tmp_path, environment, torch="2.14.1+cu130", cuDNN="92400")
    monkeypatch.setattr(rest, "run", lambda errands, *_: begun.append(errands) or 0)

    assert rest.main([]) == 0

    assert begun == [list(ERRANDS)]
    told = (
        "is to be shown anew: software cuDNN was 91900, is 92400; software torch was 2.11.0+cu130, is 2.14.1"
    )
    assert told in capsys.readouterr().out


def test_a_folder_of_lines_of_other_libraries_is_refused_before_anything_is_run(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    header, *_ = (RESULTS / step_lines.LINES).read_text(encoding="utf-8").splitlines()
    (tmp_path / step_lines.LINES).write_text(f"{header}\n{header[:300]}", encoding="utf-8")  # and one cut off
    on_a_card(monkeypatch, tmp_path, environment, torch="2.14.1+cu130")
    monkeypatch.setattr(rest, "run", lambda *_: pytest.fail("it was run"))

    assert rest.main(["--output", str(tmp_path)]) == 2

    assert "is 2.14.1+cu130: give another --output." in capsys.readouterr().err


def test_lines_that_tell_of_no_environment_are_named(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / step_lines.LINES).write_text(json.dumps({"environment": {"machine": "mine"}}) + "\n")
    on_a_card(monkeypatch, tmp_path, environment)

    assert rest.main(["--output", str(tmp_path)]) == 1

    assert "must tell of environments, but has {'environment':" in capsys.readouterr().err


def test_the_next_call_goes_on_where_the_last_one_stopped(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[Errand]] = []

    def run(errands: list[Errand], left_s: float, _: object, output: Path) -> int:
        begun.append(errands)
        assert left_s < 100.0
        with (output / step_lines.LINES).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in A_TRIAL)
        return 0

    monkeypatch.setattr(rest, "run", run)
    on_a_card(monkeypatch, tmp_path, environment)

    assert rest.main(["--seconds", "100"]) == rest.main(["--seconds", "100"]) == 0

    first, second = begun
    (vgg,) = set(first) - set(second)
    assert vgg.about == "training steps of vgg16, float32-nchw, 64MiB"


def test_recordings_are_packed_though_it_is_interrupted(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    folder = tmp_path / "profiles" / "nvidia-h200"
    folder.mkdir(parents=True)
    with SqliteStore(folder / STORE) as store:
        store.add_records(an_environment(), [a_record()])
    monkeypatch.setattr(rest, "run", interrupted)
    monkeypatch.setattr(rest, "_PROFILES", folder.parent)
    on_a_card(monkeypatch, tmp_path, environment)

    assert rest.main([]) == 130

    with SqliteStore(folder / PACKED, read_only=True) as packed:
        assert packed.count() == 1
    assert f"--retell {tmp_path / 'nvidia-h200'}\n" in capsys.readouterr().out
