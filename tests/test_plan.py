"""Plans, and plans as files."""

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.errors import PlanError, PlanFormatError
from mucudnn.evidence import CallEvidence, CallTimes, Evidence, FrozenEvidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp
from mucudnn.report import plan_as_json, render_plan
from tests.examples import a_candidate, a_plan, a_problem, an_environment

Place = tuple[str | int, ...]
"""Keys and indices that lead to a value in a JSON value."""


def test_a_site_names_its_shape_when_it_has_several() -> None:
    assert str(ConvSite("conv1", ConvOp.WGRAD)) == "conv1 wgrad"
    assert str(ConvSite("", ConvOp.FPROP, variant=1)) == "the model itself fprop (shape 2)"


def _sites(*workspaces: int) -> tuple[Assignment, ...]:
    """One undivided site of 16 samples for each workspace in bytes."""
    return tuple(
        Assignment(
            ConvSite(f"conv{index}", ConvOp.FPROP),
            a_problem(batch=16),
            Division((a_candidate(workspace_bytes=workspace),)),
        )
        for index, workspace in enumerate(workspaces)
    )


@pytest.mark.parametrize(("mode", "workspace_bytes"), [(Mode.REUSE, 500), (Mode.SHARING, 800)])
def test_workspace_is_the_largest_in_reuse_and_the_sum_in_sharing(mode: Mode, workspace_bytes: int) -> None:
    assert a_plan(mode=mode, assignments=_sites(300, 500)).workspace_bytes == workspace_bytes


def test_time_of_a_plan_is_that_of_all_its_sites() -> None:
    assert a_plan(assignments=_sites(0, 0, 0)).time_s == pytest.approx(3 * 0.002)


@pytest.mark.parametrize(("mode", "needed"), [(Mode.REUSE, 500), (Mode.SHARING, 800)])
def test_a_plan_exactly_at_the_limit_passes(mode: Mode, needed: int) -> None:
    a_plan(mode=mode, assignments=_sites(300, 500), limit_bytes=needed).check()


@pytest.mark.parametrize(("mode", "needed"), [(Mode.REUSE, 500), (Mode.SHARING, 800)])
def test_a_plan_one_byte_over_the_limit_is_refused(mode: Mode, needed: int) -> None:
    plan = a_plan(mode=mode, assignments=_sites(300, 500), limit_bytes=needed - 1)

    with pytest.raises(
        PlanError, match=rf"must be at most {needed - 1} bytes .* but the plan needs {needed} "
    ):
        plan.check()


def test_the_limit_is_exact_beyond_the_precision_of_floats() -> None:
    plan = a_plan(assignments=_sites(2**60 + 1), limit_bytes=2**60)

    with pytest.raises(PlanError, match=f"but the plan needs {2**60 + 1}"):
        plan.check()


def test_a_site_that_stands_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="some site stands twice"):
        a_plan(assignments=_sites(0) * 2).check()


def test_parts_that_do_not_add_up_are_refused() -> None:
    short = dataclasses.replace(_sites(0)[0], problem=a_problem(batch=17))

    with pytest.raises(PlanError, match="The parts of conv0 fprop must add up to 17 samples, but got 16"):
        a_plan(assignments=(short,)).check()


def test_an_algorithm_with_two_set_up_times_is_refused() -> None:
    (assigned,) = _sites(0)
    other = dataclasses.replace(assigned.division.parts[0], batch=1, setup_s=0.5)

    with pytest.raises(PlanError, match="An algorithm of conv0 fprop must have one set-up time"):
        a_plan(assignments=(dataclasses.replace(assigned, candidates=(other,)),)).check()


def test_a_problem_of_another_op_is_refused() -> None:
    (assigned,) = _sites(0)
    other = dataclasses.replace(assigned, problem=assigned.problem.with_op(ConvOp.DGRAD))

    with pytest.raises(PlanError, match="The problem of conv0 fprop must be of that op, but got dgrad"):
        a_plan(assignments=(other,)).check()


def _plan_with_everything() -> Plan:
    measured = Estimate(0.1, 0.09, 0.11, 10)
    evidence = Evidence(
        reference=Estimate(0.25, -math.inf, math.inf, 3),
        chosen=measured,
        verdict=Verdict.FASTER,
        reference_workspace_bytes=4096,
        workspace_bytes=1000,
        error=1e-7,
        rejected=(("cpu:fft@32*1", Estimate(0.2, 0.19, 0.21, 10)),),
        speedups=(("cpu:fft@32*1", Estimate(1.2, 1.1, math.inf, 10)),),
    )
    (assigned,) = a_plan().assignments
    sites = [dataclasses.replace(assigned, evidence=evidence), *_sites(5, 7)]
    return a_plan(
        mode=Mode.SHARING,
        assignments=tuple(sites),
        untouched=(("conv9", "its padding mode is reflect."),),
        calls=(
            CallEvidence(
                Estimate(0.25, -math.inf, math.inf, 3), measured, measured, Verdict.SAME, "conv1", 1
            ),
        ),
        frozen=(
            FrozenEvidence("conv1", 1, 4096, CallTimes(measured, measured, measured, Verdict.FASTER)),
            FrozenEvidence("conv5", 0, 0),
        ),
    )


def test_joined_plans_have_all_that_each_has_of_its_sites() -> None:
    first = dataclasses.replace(_plan_with_everything(), transposed=("conv0", "conv1"))
    evidence = CallTimes(*[Estimate(0.5, 0.4, 0.6, 8)] * 3, Verdict.SAME)
    second = a_plan(
        untouched=(("conv7", "it is sparse."),),
        calls=(CallEvidence(**vars(evidence), path="conv6", variant=2),),
        frozen=(FrozenEvidence("conv6", 2, 0),),
        transposed=("conv1", "conv6"),
    )

    joined = first.joined([second, a_plan(assignments=())])

    for field in dataclasses.fields(Plan):
        here, other, both = (getattr(plan, field.name) for plan in (first, second, joined))
        if isinstance(here, tuple):
            assert here
            assert other
            assert both == tuple(dict.fromkeys(here + other)), field.name
        else:
            assert both == here, field.name


def test_a_plan_survives_saving_and_loading(tmp_path: Path) -> None:
    _plan_with_everything().save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == _plan_with_everything()


def test_a_loaded_plan_is_saved_byte_for_byte(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    _plan_with_everything().save(first)

    Plan.load(first).save(second)

    assert second.read_bytes() == first.read_bytes()


@given(time_s=st.floats(0, 1e6, allow_nan=False), workspace_bytes=st.integers(0, 2**62))
def test_numbers_survive_exactly(time_s: float, workspace_bytes: int) -> None:
    part = a_candidate(batch=32, time_s=time_s, workspace_bytes=workspace_bytes)
    (assigned,) = a_plan().assignments
    plan = a_plan(assignments=(dataclasses.replace(assigned, division=Division((part,))),), limit_bytes=2**62)

    (loaded,) = Plan.from_text(plan.to_text()).assignments

    assert loaded.division.parts == (part,)


def test_what_is_not_deterministic_is_so_after_loading_and_the_rest_is_written_as_before() -> None:
    steady = a_candidate(batch=16, is_deterministic=True)
    varying = dataclasses.replace(steady, is_deterministic=False)
    (assigned,) = a_plan().assignments
    plan = a_plan(assignments=(dataclasses.replace(assigned, division=Division((steady, varying))),))

    (loaded,) = Plan.from_text(plan.to_text()).assignments

    assert loaded.division.parts == (steady, varying)
    text = json.loads(plan.to_text())
    assert [len(part) for part in text["assignments"][0]["division"]] == [5, 6]
    assert text["schema"] == 4


def test_a_problem_of_many_sites_is_written_once() -> None:
    text = a_plan(assignments=_sites(1, 2, 3)).to_text()

    assert len(json.loads(text)["problems"]) == 1


def test_saving_replaces_an_older_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    a_plan(version="0.0.1").save(path)

    a_plan(version="0.0.2").save(path)

    assert Plan.load(path).version == "0.0.2"


def test_an_older_plan_is_replaced_and_not_written_into(tmp_path: Path) -> None:
    path, other = tmp_path / "plan.json", tmp_path / "other.json"
    a_plan(version="0.0.1").save(path)
    other.hardlink_to(path)

    a_plan(version="0.0.2").save(path)

    assert [Plan.load(each).version for each in (path, other)] == ["0.0.2", "0.0.1"]


def test_saving_leaves_nothing_but_the_plan(tmp_path: Path) -> None:
    a_plan().save(tmp_path / "plan.json")

    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_save_that_fails_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.mkdir()

    with pytest.raises(OSError, match=r"plan\.json"):
        a_plan().save(target)

    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_save_into_a_missing_folder_names_the_plan(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        a_plan().save(tmp_path / "nowhere" / "plan.json")

    assert raised.value.filename == str(tmp_path / "nowhere" / "plan.json")


def test_saving_through_a_link_writes_what_it_names(tmp_path: Path) -> None:
    link, target = tmp_path / "plan.json", tmp_path / "plan-2.json"
    target.write_text("an older one")
    link.symlink_to(target)

    a_plan().save(link)

    assert link.is_symlink()
    assert Plan.load(target) == a_plan()


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    a_plan().save(pipe)

    assert pipe.is_fifo()
    with os.fdopen(reading, encoding="utf-8") as reader:
        assert Plan.from_text(reader.read()) == a_plan()


def test_a_pipe_without_a_name_is_written_to() -> None:
    reading, writing = os.pipe()

    a_plan().save(f"/dev/fd/{writing}")

    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as reader:
        assert Plan.from_text(reader.read()) == a_plan()


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_file_that_is_open_already_goes_on_where_it_was(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "all"
    with file.open(mode, encoding="utf-8") as opened:
        opened.write("before\n")
        opened.flush()
        a_plan().save(f"/dev/fd/{opened.fileno()}")
        opened.write("after\n")

    assert file.read_text(encoding="utf-8") == f"before\n{a_plan().to_text()}after\n"


def test_standard_output_is_written_behind_what_was_printed(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-c",
        "import tests.examples as e; print(1); e.a_plan().save('/dev/stdout'); print(2)",
    ]
    with (tmp_path / "all").open("w", encoding="utf-8") as output:
        subprocess.run(words, stdout=output, check=True)

    assert (tmp_path / "all").read_text(encoding="utf-8") == f"1\n{a_plan().to_text()}2\n"


def test_an_open_file_is_written_where_nothing_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = (tmp_path / "closed").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with (tmp_path / "plan.json").open("w") as opened:
        a_plan().save(f"/dev/fd/{opened.fileno()}")

    assert Plan.load(tmp_path / "plan.json") == a_plan()


def test_an_open_file_is_written_where_what_is_printed_goes_to_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: None))  # of which nobody asks more
    with (tmp_path / "plan.json").open("w") as opened:
        a_plan().save(f"/dev/fd/{opened.fileno()}")

    assert Plan.load(tmp_path / "plan.json") == a_plan()


def test_a_plan_in_shared_memory_is_replaced_as_any_other() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for _ in range(2):
            a_plan().save(f"{folder}/plan.json")

        assert Plan.load(f"{folder}/plan.json") == a_plan()


def test_a_plan_that_is_saved_again_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    a_plan().save(path)
    path.chmod(0o640)

    a_plan().save(path)

    assert path.stat().st_mode & 0o777 == 0o640


def test_a_loop_of_links_which_name_nothing_gives_way_to_the_plan(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)

    a_plan().save(one)

    assert Plan.load(one) == a_plan()


def test_a_truncated_plan_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(a_plan().to_text()[:-20])

    with pytest.raises(PlanFormatError, match=r"plan\.json cannot be used: .* this one is damaged"):
        Plan.load(path)


def test_bytes_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\x80\x02}q\x00.")

    with pytest.raises(PlanFormatError, match=r"plan\.json is no plan: it is not a text"):
        Plan.load(path)


def test_a_contradiction_in_a_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    a_plan(limit_bytes=1000).save(path)

    with pytest.raises(PlanFormatError, match=r"plan\.json cannot be used: .* at most 1000 bytes"):
        Plan.load(path)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "3", '{"schema": "1"}', '{"schema": null}', '{"schema": true}', '{"schema": 0}']
)
def test_json_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanFormatError, match="must name its schema"):
        Plan.from_text(text)


def test_a_newer_schema_is_refused() -> None:
    with pytest.raises(PlanFormatError, match=r"must have schema 7 or lower, but got 8: .* newer mucudnn"):
        Plan.from_text(_edited(schema=8))


def test_a_plan_has_the_schema_of_what_is_in_it() -> None:
    everything = _plan_with_everything()
    calls = a_plan(calls=everything.calls)
    speedups = a_plan(assignments=everything.assignments, limit_bytes=2**20)
    frozen = a_plan(frozen=everything.frozen)
    (assigned,) = a_plan().assignments
    varying = (a_candidate(is_deterministic=False),)  # for smaller batches alone
    candidates = a_plan(assignments=(dataclasses.replace(assigned, candidates=varying),))
    plans = (a_plan(), calls, speedups, frozen, everything, candidates, _disturbed(everything))
    transposed = a_plan(transposed=("conv0",))
    problem = dataclasses.replace(assigned.problem, is_apart=True)
    apart = a_plan(assignments=(dataclasses.replace(assigned, problem=problem),))

    schemas = [json.loads(plan.to_text())["schema"] for plan in (*plans, transposed, apart)]

    assert schemas == [1, 2, 2, 3, 3, 4, 5, 6, 7]
    assert Plan.from_text(apart.to_text()) == apart


def test_which_convolutions_are_transposed_survives_loading_and_plans_without_any_are_as_before() -> None:
    plan = a_plan(transposed=("up.0", "up.1"))

    assert Plan.from_text(plan.to_text()) == plan
    assert "transposed" not in a_plan().to_text()


def test_what_others_took_is_told_of_all_that_was_timed_and_survives_loading() -> None:
    quiet, plan = _plan_with_everything(), _disturbed(_plan_with_everything())

    assert (quiet.others, plan.others) == ((0, 0, 0), (0.5, 1.5, 0.25))
    assert Plan.from_text(plan.to_text()) == plan
    assert "others" not in quiet.to_text()


def _disturbed(plan: Plan) -> Plan:
    """Return the same with others beside the first division, the call and the frozen graph."""
    first, *further = plan.assignments
    assert first.evidence is not None
    frozen, own = plan.frozen
    assert frozen.times is not None
    times = dataclasses.replace(frozen.times, others=0.25)
    return dataclasses.replace(
        plan,
        assignments=(
            dataclasses.replace(first, evidence=dataclasses.replace(first.evidence, others=0.5)),
            *further,
        ),
        calls=tuple(dataclasses.replace(call, others=1.5) for call in plan.calls),
        frozen=(dataclasses.replace(frozen, times=times), own),
    )


def _edited(**fields: object) -> str:
    return json.dumps({**json.loads(a_plan().to_text()), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "both"},
        {"policy": None},
        {"limit_bytes": 2048.5},
        {"limit_bytes": -1},
        {"limit_bytes": True},
        {"limit_bytes": "2048"},
        {"environment": {"backend": "cpu"}},
        {"problems": []},
        {"problems": [{"op": "fprop"}]},
        {"assignments": [{}]},
        {"assignments": None},
        {"untouched": ["conv9"]},
        {"untouched": [["conv9"]]},
        {"version": 1},
        {"colour": "red"},
    ],
)
def test_a_damaged_field_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(PlanFormatError, match="a field is missing or wrong"):
        Plan.from_text(_edited(**fields))


@pytest.mark.parametrize(
    "change",
    [
        {"problem": -1},
        {"problem": 1},
        {"variant": 0.5},
        {"division": [["cpu:direct", 32, 0.1, None, 0.0]]},
        {"division": [["cpu:direct", 32, 0.1, 10.5, 0.0]]},
        {"division": [["cpu:direct", 32, -0.1, 10, 0.0]]},
        {"division": [["cpu:direct", 32]]},
        {"division": [[3, 32, 0.1, 10, 0.0]]},
        {"path": []},
        {"variant": -1},
        {"op": "conv"},
        {"division": [["a", 8, 0.1, 0, 0.0], ["b", 16, 0.1, 0, 0.0], ["a", 8, 0.1, 0, 0.0]]},
        {"evidence": {}},
    ],
)
def test_a_damaged_assignment_is_refused(change: dict[str, object]) -> None:
    (row,) = json.loads(a_plan().to_text())["assignments"]

    with pytest.raises(PlanFormatError, match="a field is missing or wrong"):
        Plan.from_text(_edited(assignments=[{**row, **change}]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "this one is nested too deeply"),
        ('{"schema":' * 100_000, "this one is nested too deeply"),
        (f'{{"schema": 1{"0" * 5000}}}', r"numbers must be at most 1e\+100 in size, but got 1(0){19}\.\.\."),
        ('{"schema": NaN}', "numbers must be at most .* but got NaN"),
        ('{"schema": 1, "version": -Infinity}', "numbers must be at most .* but got -Infinity"),
        ('{"schema": 1, "limit_bytes": 1e999}', "numbers must be at most .* but got 1e999"),
        ("\x00", "this one is damaged"),
        (r'{"schema": 1, "version": "a\ud800b"}', r"texts must be printable, but one has '\\ud800'\.$"),
        ('{"schema": 1, "version": "a\udfffb"}', r"texts must be printable, but one has '\\udfff'\.$"),
        (r'{"schema": 1, "sites": [{"\u001b[2J": 5}]}', r"texts must be printable, but one has '\\x1b'\.$"),
        ('{"schema": 1, "sites": ["\x9b2J"]}', r"texts must be printable, but one has '\\x9b'\.$"),
    ],
    ids=[
        *("lists", "objects", "digits", "NaN", "Infinity", "1e999", "zero byte", "half", "half as it is"),
        *("control character", "control character as it is"),
    ],
)
def test_what_a_reader_of_json_stumbles_over_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_text(text)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (
            ("environment", "software"),
            ["torch"],
            "the plan.environment.software must be an object, but got a",
        ),
        (
            ("environment", "device"),
            5,
            "the plan.environment.device must be an object, but got a whole number",
        ),
        (
            ("environment", "policy", "threads"),
            8,
            "environment.policy.threads must be a text, but got a whole",
        ),
        (("problems", 0, "bias"), [], r"problems\[0\].bias must be true or false, but got a list"),
        (("problems", 0, "groups"), 7, r"problems\[0\]: groups must divide both c and k"),
        (("assignments", 0, "problem"), 9, "there must be a problem 9, but got 2 problems"),
        (("assignments", 0, "path"), [], r"assignments\[0\].path must be a text, but got a list"),
        (("assignments", 0, "evidence", "error"), "small", "error must be a number, but got a text"),
        (("assignments", 0, "evidence", "chosen", 0), "0.1", r"chosen\[0\] must be a number, but got a text"),
        (("assignments", 0, "evidence", "chosen", 0), 1e-200, "must be 0 or at least 1e-100 seconds"),
        (
            ("assignments", 0, "evidence", "chosen", 2),
            0,
            "an upper end above 0, as its median is .*, but got 0",
        ),
        (("assignments", 0, "evidence", "verdict"), "GOOD", "must be one of FASTER, .* but got 'GOOD'"),
        (("assignments", 0, "evidence"), {}, "evidence must have reference, .* but got nothing"),
        (
            ("assignments", 0, "division", 0, 0),
            3,
            r"division\[0\]\[0\] must be a text, but got a whole number",
        ),
        (("untouched", 0), ["conv9"], r"untouched\[0\] must have 2 values, but got 1"),
    ],
)
def test_a_message_names_the_damaged_field(keys: Place, value: object, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_text(_damaged(keys, value))


def _damaged(place: Place, value: object) -> str:
    """The plan with everything as text, with `value` at a place."""
    root = [json.loads(_plan_with_everything().to_text())]
    inner: Any = root
    *way, last = (0, *place)
    for key in way:
        inner = inner[key]
    inner[last] = copy.deepcopy(value)
    return json.dumps(root[0])


def _places(value: object, place: Place = ()) -> Iterator[Place]:
    """Yield the places of a JSON value and of all values in it, containers and leaves."""
    yield place
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*place, key))


DAMAGES = [None, "x", "", 5, -1, 0, 0.5, math.inf, math.nan, 1e308, 1e-308, 10**90, [], {}, True]


@pytest.mark.parametrize("damage", DAMAGES, ids=repr)
def test_a_plan_with_any_value_replaced_is_refused_or_can_be_used(damage: object) -> None:
    for place in _places(json.loads(_plan_with_everything().to_text())):
        try:
            plan = Plan.from_text(_damaged(place, damage))
        except PlanError:
            continue
        assert Plan.from_text(plan.to_text()) == plan
        assert render_plan(plan)
        assert json.dumps(plan_as_json(plan), allow_nan=False)
        assert hash(plan) is not None


def test_a_plan_with_any_value_removed_is_refused_or_can_be_used() -> None:
    whole = json.loads(_plan_with_everything().to_text())
    for *way, last in filter(None, _places(whole)):
        damaged = copy.deepcopy(whole)
        inner = damaged
        for key in way:
            inner = inner[key]
        del inner[last]
        try:
            plan = Plan.from_text(json.dumps(damaged))
        except PlanError:
            continue
        assert render_plan(plan)


def test_equal_plans_have_equal_hashes() -> None:
    plan = _plan_with_everything()
    loaded = Plan.from_text(plan.to_text())

    assert len({plan, loaded, dataclasses.replace(plan, limit_bytes=2**20)}) == 2


def test_a_loaded_plan_knows_the_soft_facts_of_its_environment() -> None:
    plan = a_plan(environment=an_environment(soft={"load": "3.5"}))

    assert Plan.from_text(plan.to_text()).environment.soft == {"load": "3.5"}


def test_the_sites_of_a_plan_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        a_plan().sites[ConvSite("conv1", ConvOp.FPROP)] = Division(())  # type: ignore[index]  # that is the point


def test_the_error_that_was_allowed_stands_in_the_file_where_there_was_such_a_bound() -> None:
    plan = a_plan(max_error=2e-6)

    assert Plan.from_text(plan.to_text()) == plan
    assert '"max_error": 2e-06' in plan.to_text()
    assert "max_error" not in a_plan().to_text()


def test_a_plan_without_calls_is_written_as_it_was_before_there_were_any() -> None:
    assert "calls" in _plan_with_everything().to_text()
    assert "calls" not in a_plan().to_text()


def test_a_plan_is_short_where_it_is_only_named() -> None:
    assert repr(a_plan()) == (
        "<Plan for 1 sites, 1 of them in micro-batches, by cpu:direct; reuse of 2 KiB; "
        "`mucudnn.report.render_plan` returns it as a table>"
    )
