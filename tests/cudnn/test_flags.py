"""What of a card and of PyTorch's settings decides whether a plan may run: flags, asked of at every call."""

import contextlib
import dataclasses
import os
import types
import warnings
from collections.abc import Iterator

import pytest
import torch

from mucudnn.backends.cudnn import environment
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.environment import present_policy
from mucudnn.convolutions.notices import Notice
from mucudnn.division import Division
from mucudnn.errors import PlanMismatchError, UntunedWarning
from mucudnn.patching.fitting import Memory
from mucudnn.patching.shapes import TunedShapes, Variant
from mucudnn.patching.suiting import check_runnable
from mucudnn.plan import Assignment, ConvSite
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from tests.cudnn.absent import Absent
from tests.cudnn.paper import PaperCard
from tests.operands import a_convolution

PROBLEM = a_convolution()


def a_backend(kind: str) -> CudnnBackend:
    return CudnnBackend(PaperCard(kind=kind), None)


def shapes_tuned_on(backend: CudnnBackend) -> TunedShapes:
    memory = Memory(backend.environment(), False, 0, 0, 0)  # noqa: FBT003  # not in sharing mode
    return TunedShapes("conv", (Variant(PROBLEM, {}),), memory, Notice(), backend.flags())


def test_a_model_that_is_moved_to_another_kind_of_card_runs_as_before_and_says_so() -> None:
    shapes = shapes_tuned_on(a_backend("NVIDIA H200"))

    with pytest.warns(
        UntunedWarning, match="another environment: device name was NVIDIA H200, is NVIDIA A100"
    ):
        assert shapes.convolution(a_backend("NVIDIA A100"), PROBLEM) is None


def test_a_model_that_is_moved_to_a_card_of_the_same_kind_runs_its_plan() -> None:
    shapes = shapes_tuned_on(a_backend("NVIDIA H200"))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        assert shapes.convolution(a_backend("NVIDIA H200"), PROBLEM) is not None


def test_a_card_is_asked_once_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(index: int) -> object:
        asked.append(index)
        return types.SimpleNamespace(name=f"card {index}", major=9, minor=0, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    cards = [Absent(index) for index in (0, 1)]

    flags = [[CudnnBackend(card, None).flags() for _ in range(2)] for card in cards]

    assert flags[0][0] == flags[0][1] != flags[1][0]
    assert asked == [0, 1]


USUAL = {"enabled", "TF32", "deterministic", "benchmark", "benchmark limit"}
"""The settings that are always named, as when an H200 was recorded: what was measured then is to answer."""


@contextlib.contextmanager
def _with(owner: object, name: str, *, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@contextlib.contextmanager
def _all_deterministic(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True, warn_only=warn_only)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Strict float32, and all else as PyTorch comes, but with TunableOp, which builds without CUDA lack."""
    for name in [name for name in os.environ if name.startswith(environment._VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_HAS_TUNABLE", True)
    with (
        _with(torch.cuda.tunable, "is_enabled", value=lambda: False),
        _with(torch.backends.cudnn.conv, "fp32_precision", value="ieee"),
    ):
        yield


CHANGES = {
    "no cuDNN": lambda: _with(torch.backends.cudnn, "enabled", value=False),
    "benchmark": lambda: _with(torch.backends.cudnn, "benchmark", value=True),
    "deterministic": lambda: _with(torch.backends.cudnn, "deterministic", value=True),
    "convolutions in TF32": lambda: _with(torch.backends.cudnn.conv, "fp32_precision", value="tf32"),
    "products in TF32": lambda: _with(torch.backends.cuda.matmul, "fp32_precision", value="tf32"),
    "all deterministic": _all_deterministic,
    "all deterministic, or a warning": lambda: _all_deterministic(warn_only=True),
    "TunableOp": lambda: _with(torch.cuda.tunable, "is_enabled", value=lambda: True),
}


def flags() -> object:
    card = Absent()
    card.kind = "a card"
    return CudnnBackend(card, None).flags()


@pytest.mark.usefixtures("usual")
def test_settings_that_are_as_usual_are_those_that_were_recorded() -> None:
    assert present_policy().keys() == USUAL


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_policy_changes_the_flags(change: str) -> None:
    policy_before, flags_before = present_policy(), flags()

    with CHANGES[change]():
        assert present_policy() != policy_before
        assert flags() != flags_before
    assert (present_policy(), flags()) == (policy_before, flags_before)


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize(
    ("change", "added"),
    [
        ("products in TF32", {"torch.backends.cuda.matmul in TF32"}),
        ("all deterministic", {"torch.use_deterministic_algorithms without CUBLAS_WORKSPACE_CONFIG"}),
        ("all deterministic, or a warning", set()),
        ("TunableOp", {"torch.cuda.tunable"}),
    ],
)
def test_what_keeps_products_from_being_computed_is_a_setting_of_its_own(
    change: str, added: set[str]
) -> None:
    with CHANGES[change]():
        assert present_policy().keys() == USUAL | added


@pytest.mark.usefixtures("usual")
def test_products_in_tf32_are_no_other_setting_where_convolutions_are_in_tf32_too() -> None:
    with CHANGES["convolutions in TF32"]():
        before = present_policy()
        with CHANGES["products in TF32"]():
            assert present_policy() == before


SMALL = a_convolution(batch=2)


def a_backend_that_rounds() -> CudnnBackend:
    card = PaperCard(Rules(allow_tf32=False))
    card.rounding = {"float32"}
    return CudnnBackend(card, None)


def divided_by_tiles() -> Assignment:
    parts = tuple(Candidate("cuda:winograd4", 1, 0.0, 2**20) for _ in range(SMALL.batch))
    return Assignment(ConvSite("conv", ConvOp.FPROP), SMALL, Division(parts))


def test_a_plan_of_tiles_that_the_users_flags_forbid_is_refused_with_the_reason() -> None:
    with pytest.raises(
        PlanMismatchError, match=r"which does not compute .* here: float32 may be rounded\. Tuned"
    ):
        check_runnable(divided_by_tiles(), a_backend_that_rounds())


def test_a_call_by_tiles_that_the_users_flags_forbid_is_told_of_with_the_reason() -> None:
    backend, assigned = a_backend_that_rounds(), divided_by_tiles()
    memory = Memory(backend.environment(), False, 2**20, 2**20, 2**20)  # noqa: FBT003  # not in sharing mode
    variant = Variant(SMALL, {ConvOp.FPROP: assigned})
    shapes = TunedShapes("conv", (variant,), memory, Notice(), backend.flags())

    with pytest.warns(UntunedWarning, match=r"winograd4 does not compute .* here: float32 may be rounded\."):
        assert shapes.convolution(backend, SMALL) is None


def test_tiles_say_why_they_compute_something_or_not() -> None:
    card = PaperCard(Rules(allow_tf32=False))
    backend = CudnnBackend(card, None)

    assert backend.refusal(SMALL, "cuda:winograd4") is None
    assert backend.refusal(dataclasses.replace(SMALL, dtype="bfloat16"), "cuda:winograd4")
    assert backend.refusal(SMALL, backend.own) is None
    card.can_compile = False
    assert backend.refusal(SMALL, "cuda:winograd4") == "there is no CuPy that compiles kernels"
