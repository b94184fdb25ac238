"""Two ranks, in processes of their own: one plan, and the gradients of unpatched ones."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp
from mucudnn.ranks import Picture, _objection
from tests.examples import a_problem, an_environment
from tests.ranks_program import RANKS, RUNS

LONG_S = 240
SITE, OTHER = ConvSite("conv", ConvOp.FPROP), ConvSite("other", ConvOp.FPROP)
TOLERANCE = 1e-9

Found = Mapping[str, Sequence[dict[str, Any]]]
"""By run, what each rank has found."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks_program", str(folder)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = ranks.communicate(timeout=LONG_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, errors
    replies = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {what: [reply[what] for reply in replies] for what in RUNS}


@pytest.mark.parametrize("what", ["ddp", "fsdp", "ddp_first"])
def test_ranks_have_one_plan_that_the_first_has_made_and_the_gradients_of_their_twins(
    what: str, found: Found
) -> None:
    first, second = found[what]

    assert first["plan"] == second["plan"]
    assert first["measured"] > 0 == second["measured"]
    assert max(first["largest"], second["largest"]) < TOLERANCE
    assert first["gradients"] == pytest.approx(second["gradients"])
    assert first["gradients"] > 0


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("other_model", "rank 1 computes nothing at 0 dgrad|rank 1 computes fprop 8x3x6x6 -> 4, kernel 5x5"),
        ("other_threads", "rank 1 has another environment: .*threads"),
        ("other_limit", r"rank 1 asks for workspace_limit .*\(32 MiB\), where rank 0 asks for .*\(64 MiB\)"),
    ],
)
def test_ranks_that_differ_raise_before_anything_is_tuned(what: str, reason: str, found: Found) -> None:
    first, second = found[what]

    assert first["error"].startswith("PlanMismatchError: All ranks must be able to run one plan, but rank")
    assert first == second
    assert first["measured"] == 0
    assert re.search(reason, first["error"])


@pytest.mark.parametrize(
    ("what", "by"), [("fsdp_first", "fully_shard"), ("flat_first", "FullyShardedDataParallel")]
)
def test_a_model_that_is_sharded_already_is_refused(what: str, by: str, found: Found) -> None:
    assert [each["error"] for each in found[what]] == [
        f"SampleError: The model must be whole, but it is sharded by {by}; optimize it with a sample "
        "first, and shard then."
    ] * RANKS


def test_no_rank_waits_for_one_that_could_not_tune(found: Found) -> None:
    first, second = found["failing"]

    assert first["error"] == second["error"] == "BackendError: nothing can be measured"


def test_no_rank_waits_for_one_that_has_nothing_to_tune(found: Found) -> None:
    first, second = found["nothing"]

    assert first == second
    assert first["error"].startswith("NothingToTuneError: The model must have a convolution")


def test_ranks_compare_a_step_together_and_the_first_ones_verdicts_count(found: Found) -> None:
    first, second = found["compared"]

    assert first["rounds"] == second["rounds"] == 20
    assert first["slower_here"] == first["layers"] == second["layers"] > second["slower_here"]
    assert first["slower"] == second["slower"] == first["layers"]
    assert first["settled"] == second["settled"]
    assert first["algorithms"] == second["algorithms"] == ["cpu:aten"]


HERE = Picture({SITE: a_problem()}, an_environment(), {"mode": "reuse"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"environment": an_environment(soft={"load": "9"})}, None),
        ({"environment": an_environment(policy={"threads": "3"})}, "has another environment: .*threads"),
        ({"asked": {"mode": "sharing"}}, "^asks for mode sharing, where rank 0 asks for reuse$"),
        ({"asked": {}}, "^is of another release: of it and rank 0 only one knows the option 'mode'$"),
        (
            {"asked": {"mode": "reuse", "depth": "3"}},
            "^is of another release: .* only one knows the option 'depth'$",
        ),
        ({"problems": {}}, "^computes nothing at conv fprop, where rank 0 computes fprop 32x"),
        ({"problems": {SITE: a_problem(batch=3)}}, "^computes fprop 3x.* at conv fprop, where rank 0 com"),
        (
            {"problems": {SITE: a_problem(), OTHER: a_problem()}},
            "^computes .* at other fprop, where .* nothing",
        ),
    ],
)
def test_a_rank_objects_if_it_wants_another_plan(changes: dict[str, Any], reason: str | None) -> None:
    said = _objection(HERE, dataclasses.replace(HERE, **changes))

    if reason is None:
        assert said is None
    else:
        assert re.search(reason, str(said))
