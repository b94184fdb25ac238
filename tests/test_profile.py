"""Environments, measurements and candidates."""

import dataclasses
import math
from typing import Any

import pytest

from mucudnn.intervals import Estimate
from mucudnn.profile import Candidate, Comparison, Environment, Measurement
from tests.examples import DECIDING_CHANGES, a_candidate, a_problem, an_environment


@pytest.mark.parametrize("name", DECIDING_CHANGES)
def test_each_deciding_fact_alone_makes_another_environment(name: str) -> None:
    changed = an_environment(**{name: DECIDING_CHANGES[name]})

    assert changed != an_environment()
    assert changed.key != an_environment().key


def test_an_additional_fact_makes_another_environment() -> None:
    changed = an_environment(policy={"threads": "8", "deterministic": "no", "tf32": "yes"})

    assert changed.key != an_environment().key


def test_soft_facts_do_not_make_another_environment() -> None:
    changed = an_environment(soft={"load": "7.9"})

    assert changed == an_environment()
    assert changed.key == an_environment().key


def test_the_order_of_facts_does_not_matter() -> None:
    changed = an_environment(policy={"deterministic": "no", "threads": "8"})

    assert changed.key == an_environment().key


def test_the_same_fact_elsewhere_makes_another_environment() -> None:
    assert Environment("cpu", {"a": "1"}, {}, {}).key != Environment("cpu", {}, {"a": "1"}, {}).key


def test_every_field_of_an_environment_is_deciding_or_soft() -> None:
    assert {field.name for field in dataclasses.fields(Environment)} == {*DECIDING_CHANGES, "soft"}


def test_differences_name_the_recorded_and_the_present_value() -> None:
    present = an_environment(policy={"threads": "4", "tf32": "yes"})

    assert an_environment().differences(present) == [
        "setting deterministic was no, is unset",
        "setting tf32 was unset, is yes",
        "setting threads was 8, is 4",
    ]


def test_of_another_backend_only_what_both_know_is_compared() -> None:
    present = an_environment(backend="cudnn", policy={"threads": "4", "tf32": "yes"})

    assert an_environment().differences(present) == [
        "backend was cpu, is cudnn",
        "setting threads was 8, is 4",
    ]


def test_soft_facts_are_no_difference() -> None:
    assert an_environment().differences(an_environment(soft={})) == []


def test_an_environment_survives_json_with_its_soft_facts() -> None:
    copy = Environment(**an_environment().to_json())  # type: ignore[arg-type]  # its fields are mappings

    assert copy == an_environment()
    assert copy.soft == {"load": "0.3"}


def test_environments_are_keys_of_a_dictionary_whatever_their_soft_facts() -> None:
    environments = [an_environment(), an_environment(soft={"load": "7.9"}), an_environment(backend="cudnn")]

    assert len(set(environments)) == 2
    assert hash(an_environment(policy={"deterministic": "no", "threads": "8"})) == hash(an_environment())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": None}, "backend must be a text, but got a value of type NoneType"),
        ({"software": ["torch"]}, "software must be a mapping, but got a value of type list"),
        ({"device": 5}, "device must be a mapping, but got a value of type int"),
        ({"policy": {"threads": 8}}, "policy must have texts only, but got {'threads': 8}"),
        ({"soft": {1: "load"}}, "soft must have texts only"),
    ],
)
def test_what_no_environment_has_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        an_environment(**changes)


def test_samples_are_seconds_per_call() -> None:
    assert Measurement((4_000, 8_000), calls=4).samples_s == pytest.approx([1e-6, 2e-6])


def test_estimate_is_that_of_the_samples() -> None:
    measurement = Measurement((2_000_000_000, 4_000_000_000, 3_000_000_000) * 2)

    assert measurement.estimate == Estimate(3.0, low=2.0, high=4.0, samples=6)


@pytest.mark.parametrize(("spans_ns", "calls"), [((), 1), ((5, 0), 1), ((5.0,), 1), ((5,), 0), ((5,), True)])
def test_times_that_no_clock_has_shown_are_refused(spans_ns: tuple[Any, ...], calls: int) -> None:
    with pytest.raises(ValueError, match="spans and calls that are whole numbers above 0, but got"):
        Measurement(spans_ns, calls)


@pytest.mark.parametrize("others", [-0.1, math.inf, math.nan])
def test_others_take_no_such_number_of_processors(others: float) -> None:
    with pytest.raises(ValueError, match="others must be finite and not negative, but got"):
        Measurement((5,), others=others)


def test_candidates_with_equal_fields_are_equal() -> None:
    assert Candidate("cpu:direct", 16, 0.002, 1024) == Candidate("cpu:direct", 16, 0.002, 1024, setup_s=0.0)


@pytest.mark.parametrize(
    "changes",
    [{"algorithm": "cpu:fft"}, {"batch": 8}, {"time_s": 0.003}, {"workspace_bytes": 0}, {"setup_s": 0.1}],
)
def test_each_field_alone_makes_another_candidate(changes: dict[str, Any]) -> None:
    assert a_candidate(**changes) != a_candidate()


def test_a_candidate_may_cost_nothing() -> None:
    assert a_candidate(time_s=0.0, workspace_bytes=0).workspace_bytes == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1, but got 0"),
        ({"batch": 1.0}, "batch must be a whole number of at least 1, but got 1.0"),
        ({"workspace_bytes": -1}, "workspace_bytes must be a whole number of at least 0, but got -1"),
        (
            {"workspace_bytes": float("nan")},
            "workspace_bytes must be a whole number of at least 0, but got nan",
        ),
        ({"time_s": float("nan")}, "time_s must be finite and not negative, but got nan"),
        ({"time_s": float("inf")}, "time_s must be finite"),
        ({"algorithm": 3}, "algorithm must be a text, but got 3"),
        ({"batch": True}, "batch must be a whole number of at least 1, but got True"),
        ({"time_s": "0.1"}, "time_s must be finite and not negative, but got '0.1'"),
        ({"time_s": False}, "time_s must be finite and not negative, but got False"),
        ({"setup_s": -0.1}, "setup_s must be finite and not negative, but got -0.1"),
    ],
)
def test_what_no_candidate_has_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_candidate(**changes)


def test_divisions_that_were_not_timed_in_the_same_rounds_are_not_compared() -> None:
    times = {"cpu:aten@2": Measurement((7, 8, 9)), "cpu:im2col@2": Measurement((7, 8))}
    with pytest.raises(ValueError, match=r"timed in the same rounds, but got \[2, 3\] samples"):
        Comparison(a_problem(), times, {})
