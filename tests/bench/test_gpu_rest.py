"""What is run on a card that is lent for minutes, and in which order."""

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import record
from bench.gpu import layer_options, layer_run, rest, step_lines, steps
from bench.gpu.layer_cases import cases, layers
from bench.gpu.rest import ERRANDS, Errand, run, seed
from bench.record import recording
from bench.workloads import NETWORKS, SETTINGS, chosen
from mucudnn.store import SqliteStore

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "nvidia-h200"

A_ROW = {
    "network": "net", "setting": "tf32-nchw", "limit_bytes": 1, "losses": [], "time": {
        "median_us": 1.0, "low_us": None, "high_us": None, "samples": 1, "calls": 1, "converged": False,
        "spans_ns": [1000],
    },
}  # fmt: skip

PARSERS = {
    "bench.record": record._parser,
    "bench.gpu.steps": steps._parser,
    "bench.gpu.layer_run": layer_options.parser,
}


@pytest.mark.parametrize("errand", ERRANDS, ids=lambda errand: errand.about)
def test_every_errand_is_a_command_that_finds_something_to_measure(errand: Errand) -> None:
    command = errand.command(70.0 + errand.races_s)
    *_, program = command[:3]
    options = PARSERS[program]().parse_args(command[3:])

    settings = chosen(options.settings, SETTINGS)
    around_s = {"bench.gpu.layer_run": 53.0, "bench.gpu.steps": 25.0, "bench.record": 25.0}
    assert options.seconds == 70.0 - around_s[program]  # what is around it takes the rest
    assert settings
    if program == "bench.gpu.layer_run":
        assert all(any(cases(layers(), settings, [pattern])) for pattern in options.layers)
    else:
        assert chosen(options.networks, NETWORKS)


def test_the_largest_networks_have_more_time_for_their_races() -> None:
    steps = [errand for errand in ERRANDS if errand.program == "bench.gpu.steps"]
    large = {errand for errand in steps if {"vgg16", "resnet50"} & {*errand.arguments}}

    assert len(large) == 2
    assert {errand.races_s for errand in large} == {60.0}
    assert {errand.races_s for errand in steps if errand not in large} == {30.0}


@pytest.mark.parametrize("left_s", [80.0, 150.0, 480.0])
def test_layers_have_the_time_to_start_and_to_end_their_last_case_however_little_is_left(
    left_s: float,
) -> None:
    for errand in ERRANDS:
        if errand.program == "bench.gpu.layer_run":
            assert errand.timeout_s(left_s) - errand.seconds(left_s) >= 40.0


@pytest.mark.parametrize("left_s", [80.0, 150.0, 480.0])
def test_steps_have_the_time_for_rounds_that_have_begun_however_little_is_left(left_s: float) -> None:
    for errand in ERRANDS:
        if errand.program == "bench.gpu.steps":
            beyond_s = errand.timeout_s(left_s) - errand.seconds(left_s)
            assert beyond_s >= (55.0 if left_s > errand.most_s + 70.0 else 40.0)  # import, and rounds


def test_layers_have_the_time_to_end_a_process_that_hangs_before_they_are_ended() -> None:
    case_s = {}
    for errand in ERRANDS:
        if errand.program == "bench.gpu.layer_run":
            timeouts: list[float] = []
            run([errand], 500.0, lambda _, timeout_s, seen=timeouts: seen.append(timeout_s) or 0)
            options = layer_options.parser().parse_args(errand.command(500.0)[3:])
            case_s[errand.about] = options.case_seconds
            # Before its clock starts it imports torch, and so does its process.
            assert timeouts[0] >= options.seconds + options.case_seconds + layer_run.PATIENCE_S + 30

    assert [about for about, seconds in case_s.items() if seconds > 60] == [
        "workspace saved on large batches"
    ]


def test_every_errand_is_there_once() -> None:
    assert len({errand.about for errand in ERRANDS}) == len(ERRANDS)


def test_steps_begin_if_there_is_time_to_tune_them_and_end_in_theirs() -> None:
    steps_of = [each for each in ERRANDS if each.program == "bench.gpu.steps"]

    assert all(25 <= each.least_s < each.most_s for each in steps_of)
    assert max(each.least_s for each in steps_of) < rest._SECONDS


def test_steps_may_take_the_time_to_be_tuned_from_nothing_as_on_a_new_card() -> None:
    lines = (RESULTS / "record-costs.jsonl").read_text(encoding="utf-8").splitlines()
    costs = [cost for line in lines if (cost := json.loads(line))["trials"]]  # the others had been measured
    known = {(cost["network"], cost["setting"]) for cost in costs}
    for errand in ERRANDS:
        network, setting = errand.arguments[1], errand.arguments[3]
        if errand.program == "bench.gpu.steps" and (network, setting) in known:
            tuned_s = math.fsum(
                cost["seconds"] for cost in costs if (cost["network"], cost["setting"]) == (network, setting)
            )
            assert errand.most_s >= tuned_s + 25.0, errand.about  # with which tuned ones are begun


def an_errand(name: str, least_s: float = 10.0, most_s: float = 99.0) -> Errand:
    return Errand(name, f"bench.{name}", (), least_s, most_s)


def test_errands_share_the_time_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    now = itertools.count(0.0, 20.0)  # each look at the clock takes 20 s
    called = []

    def call(command: list[str], timeout_s: float) -> int:
        called.append((command[2], command[-1], timeout_s))
        return 3 if command[2] == "bench.a" else 0

    errands = [an_errand("a", most_s=40.0), an_errand("b", 50.0), an_errand("c"), an_errand("d")]
    status = run(errands, 95.0, call, clock=now.__next__)

    assert status == 3
    assert called == [("bench.a", "40", 62.0), ("bench.c", "10", 22.0)]  # what is left, less 13 s
    told = capsys.readouterr().out.splitlines()
    assert "55 s left, too few for b." in told
    assert [line for line in told if "status" in line] == ["That ended with status 3: a."]


@given(st.floats(0.0, 1000.0))
def test_no_errand_lasts_beyond_the_time_of_all(left_s: float) -> None:
    now = [0.0]

    def call(command: list[str], timeout_s: float) -> int:
        assert 0 < float(command[command.index("--seconds") + 1]) < timeout_s
        now[0] += timeout_s
        return 1

    run(ERRANDS, left_s, call, clock=lambda: now[0])

    assert now[0] <= left_s


def test_layers_and_steps_go_to_the_folder_that_is_named() -> None:
    given = {each.program: "--output" in each.command(50.0, Path("there")) for each in ERRANDS}
    assert given == {"bench.record": False, "bench.gpu.steps": True, "bench.gpu.layer_run": True}


def test_tuning_begins_with_the_recordings_of_the_card_that_come_with_the_package(tmp_path: Path) -> None:
    assert seed(tmp_path / "new", "nvidia-h200") == ["h200-tf32", "h200"]
    with recording(tmp_path / "new") as store:
        assert store.count() > 1000
    assert record.seconds_of(tmp_path / "new", "resnet18", "bfloat16-nhwc") > 60
    assert seed(tmp_path / "new", "nvidia-h200") == []  # what there is counts
    assert seed(tmp_path / "other", "nvidia-a100") == []
    assert seed(tmp_path / "lesser", "nvidia-h20") == []
    assert seed(tmp_path / "variant", "nvidia-h200-nvl") == ["h200-tf32", "h200"]


def test_a_recording_of_which_half_was_added_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SqliteStore, "add_comparisons", interrupted)
        with pytest.raises(KeyboardInterrupt):
            seed(tmp_path, "nvidia-h200")

    assert seed(tmp_path, "nvidia-h200") == ["h200-tf32", "h200"]
    with recording(tmp_path) as store:
        assert store.count() > 1000


def test_steps_are_known_once_all_ways_and_controls_have_been_tried(tmp_path: Path) -> None:
    controls = [{**A_ROW, "way": way} for way in ("as it comes", "its equal", "its equal, in another thread")]
    last = {**A_ROW, "way": "divided, in a graph"}
    failed, cut_off = {**last, "time": None, "failure": "no graph holds it"}, {**last, "time": None}
    trials = {
        "whole": [*controls, last],
        "without a graph": [*controls, failed],
        "without controls": [controls[0], last],
        "cut off": controls,
        "cut off later": [*controls, cut_off],
    }
    known = set()
    for name, rows in trials.items():
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / step_lines.LINES).write_text(text, encoding="utf-8")
        known |= {name for _ in step_lines.known(tmp_path)}

    assert known == {"whole", "without a graph"}


def test_a_trial_that_was_cut_off_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    way, last = {**A_ROW, "way": "as it comes"}, {**A_ROW, "way": "divided, in a graph"}
    path = tmp_path / step_lines.LINES
    read = {}
    failed = {**last, "time": None, "failure": "no graph holds it"}
    trials = {"cut off": [way], "whole": [way, last], "without a graph": [way, failed]}
    for name, rows in trials.items():
        lines = [*rows, {"date": ""}, {**way, "limit_bytes": 0}, {"date": ""}, {**way, "losses": [1.0]}]
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        read[name] = [row.losses for row in step_lines.read(path) if row.limit_bytes]

    assert read == {"cut off": [(1.0,)], "whole": [(), ()], "without a graph": [(), ()]}


def test_a_trial_that_no_graph_held_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    last = {**A_ROW, "way": "divided, in a graph"}
    failed = {**last, "time": None, "failure": "no graph holds it"}
    path = tmp_path / step_lines.LINES
    path.write_text("\n".join(map(json.dumps, [last, {"date": ""}, failed])), encoding="utf-8")

    assert [row.failure for row in step_lines.read(path)] == [None]


def test_without_a_card_it_lists_what_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert rest.main(["--list", "--seconds", "90"]) == 0
    told = capsys.readouterr().out
    assert "python -m bench.record --networks resnet50 --settings bfloat16-nhwc --seconds 60" in told
    assert told.count("python -m ") == len(ERRANDS)
