"""Which of the shapes that a module was tuned for serves a call."""

import dataclasses
import gc
import re
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.choices import Mode, Policy
from mucudnn.convolutions.notices import Notice, Reason
from mucudnn.division import Division
from mucudnn.errors import BackendError, UnmeasuredError, UntunedWarning, UnweighableError
from mucudnn.patching.fitting import Memory
from mucudnn.patching.shapes import AfterAll, Learn, TunedShapes, Variant, told_after_all
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate, Environment
from tests.operands import a_convolution

PIXELS = a_convolution(batch=4, input_size=(1, 1))
LAST = dataclasses.replace(PIXELS, layout=Layout.CHANNELS_LAST)


def serves(problem: ConvProblem, *tuned: ConvProblem) -> int | None:
    """The place of the shape that serves a problem, seen by what each holds when frozen; None for none."""
    backend = CpuBackend()
    memory = Memory(backend.environment(), False, 0, 0, 0)  # noqa: FBT003  # not in sharing mode
    found = []
    for place in range(len(tuned)):
        variants = tuple(
            Variant(each, {}, own_when_frozen=each.batch if number == place else 0)
            for number, each in enumerate(tuned)
        )
        shapes = TunedShapes("conv", variants, memory, Notice(), backend.flags())
        found += [place] * shapes.is_own_when_frozen(problem)
    return found[0] if found else None


@pytest.mark.parametrize("problem", [PIXELS, LAST], ids=lambda each: str(each.layout))
def test_single_pixels_of_two_layouts_have_each_their_own_shape(problem: ConvProblem) -> None:
    for tuned in ((PIXELS, LAST), (LAST, PIXELS), (PIXELS.with_batch(8), LAST), (PIXELS, LAST.with_batch(8))):
        place = serves(problem, *tuned)

        assert place is not None
        assert tuned[place].layout is problem.layout


def test_single_pixels_are_served_by_the_shape_of_the_other_layout_where_they_have_none() -> None:
    assert serves(LAST, PIXELS) == serves(PIXELS, LAST) == 0


def test_images_of_several_pixels_are_not() -> None:
    image = dataclasses.replace(PIXELS, input_size=(1, 2))

    assert serves(dataclasses.replace(image, layout=Layout.CHANNELS_LAST), image) is None


def test_of_shapes_that_differ_in_their_batches_the_smallest_that_suffices_serves() -> None:
    assert serves(PIXELS, PIXELS.with_batch(16), PIXELS.with_batch(8), PIXELS.with_batch(2)) == 1


def test_a_plan_of_another_environment_serves_no_call_there_however_often_it_is_asked() -> None:
    backend = CpuBackend()
    elsewhere = dataclasses.replace(backend.environment(), device={"name": "another"})
    memory = Memory(elsewhere, False, 0, 0, 0)  # noqa: FBT003  # not in sharing mode
    shapes = TunedShapes("conv", (Variant(PIXELS, {}),), memory, Notice(), home=None)

    with pytest.warns(UntunedWarning, match="'conv' cannot be divided here .* in another environment"):
        served = [shapes.convolution(backend, PIXELS) for _ in range(3)]

    assert served == [None] * 3


def test_calls_on_another_kind_of_device_are_told_of_unless_they_have_no_values() -> None:
    backend = CpuBackend()
    memory = Memory(backend.environment(), False, 0, 0, 0)  # noqa: FBT003  # not in sharing mode
    shapes = TunedShapes("conv", (Variant(PIXELS, {}),), memory, Notice(), backend.flags())

    for kind in ("cpu", "meta"):
        shapes.tell_device(torch.device(kind))
    with pytest.warns(UntunedWarning, match="'conv' was tuned for the backend 'cpu', but computes on cuda"):
        shapes.tell_device(torch.device("cuda"))


@pytest.mark.parametrize(
    "changes",
    [{"input_size": (1, 1), "padding": (2, 2)}, {"input_size": (3, 3), "padding": (0, 0)}],
    ids=["of the result", "of the image"],
)
def test_images_or_results_of_several_pixels_have_a_layout(changes: dict[str, Any]) -> None:
    image = dataclasses.replace(PIXELS, **changes)

    assert serves(dataclasses.replace(image, layout=Layout.CHANNELS_LAST), image) is None


def _variant(problem: ConvProblem, workspace_bytes: int = 2**20, number: int = 0) -> Variant:
    """Its forward pass runs im2col undivided."""
    division = Division((Candidate("cpu:im2col", problem.batch, 1.0, workspace_bytes),))
    assigned = Assignment(ConvSite("conv", ConvOp.FPROP, number), problem, division)
    return Variant(problem, {ConvOp.FPROP: assigned})


def _shapes(
    *variants: Variant,
    notice: Notice | None = None,
    learn: Learn | None = None,
    is_sharing: bool = False,
    **how: AfterAll,
) -> TunedShapes:
    backend = CpuBackend()
    memory = Memory(backend.environment(), is_sharing, 2**30, 2**20, 0)
    return TunedShapes("conv", variants, memory, notice or Notice(), backend.flags(), learn, **how)


def test_only_shapes_that_run_the_same_in_any_graph_have_equal_content() -> None:
    variant = _variant(PIXELS)
    assigned = variant.assignments[ConvOp.FPROP]
    profiled = dataclasses.replace(assigned, candidates=assigned.division.parts)
    others = (
        dataclasses.replace(variant, own_when_frozen=2),
        dataclasses.replace(variant, assignments={ConvOp.FPROP: profiled}),
        _variant(PIXELS, 2**19),
    )

    contents = [_shapes(each).content for each in (variant, *others)]

    assert contents[0] == _shapes(_variant(PIXELS)).content
    assert len(set(contents)) == 4


def test_a_gradient_that_was_not_tuned_is_told_of_in_the_name_of_all_equal_modules() -> None:
    after_all = told_after_all([ConvOp.WGRAD], is_for_inference=False)
    shapes = _shapes(_variant(PIXELS), after_all=after_all).for_others()
    convolution = shapes.convolution(CpuBackend(), PIXELS)
    assert convolution is not None
    weight = torch.ones(PIXELS.filter_shape, requires_grad=True)

    with pytest.warns(UntunedWarning, match="A module like 'conv' was tuned while its weight needed no"):
        convolution(torch.ones(PIXELS.input_shape), weight, None).sum().backward()


def test_why_a_single_pixel_cannot_be_divided_is_said_of_the_layout_of_the_call() -> None:
    shapes = _shapes(_variant(PIXELS, workspace_bytes=0), is_sharing=True)

    with pytest.warns(UntunedWarning, match=rf"cannot be divided here \({re.escape(str(LAST))} needs"):
        assert shapes.convolution(CpuBackend(), LAST) is None


def test_what_cannot_be_divided_keeps_nothing_alive_that_its_caller_held() -> None:
    shapes = _shapes(_variant(PIXELS, workspace_bytes=0), is_sharing=True)

    def call() -> weakref.ref[torch.Tensor]:
        activations = torch.ones(1)
        assert shapes.convolution(CpuBackend(), LAST) is None
        return weakref.ref(activations)

    gc.disable()  # which would let go of it sooner or later
    try:
        with pytest.warns(UntunedWarning, match="cannot be divided here"):
            found = call()
        assert found() is None
    finally:
        gc.enable()


class _Told(Notice):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[Reason] = []

    def give(self, reason: Reason, *words: str) -> None:
        self.reasons.append(reason)
        super().give(reason, *words)


IMAGE = a_convolution(batch=4)


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"batch": 9}, Reason.LARGER_BATCH, "was tuned for batches of 8, but meets one of 9"),
        ({"bias": True}, Reason.OTHER_BIAS, "was tuned for .*, but meets .* with a bias"),
        ({"dtype": "float64"}, Reason.OTHER_FORM, "but meets .* float64"),
        ({"layout": Layout.CHANNELS_LAST}, Reason.OTHER_FORM, "but meets .* channels_last"),
        ({"filter_layout": Layout.CHANNELS_LAST}, Reason.OTHER_FORM, "but meets"),
        ({"input_size": (5, 5)}, Reason.OTHER_SHAPE, "but meets .*x5x5"),
    ],
)
def test_what_no_shape_serves_is_told_with_the_least_in_which_it_differs(
    changes: dict[str, Any], reason: Reason, words: str
) -> None:
    told = _Told()
    shapes = _shapes(_variant(IMAGE), _variant(IMAGE.with_batch(8)), notice=told)

    with pytest.warns(UntunedWarning, match=words):
        assert shapes.convolution(CpuBackend(), dataclasses.replace(IMAGE, **changes)) is None

    assert told.reasons == [reason]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch": 1}, Reason.SINGLE_VOLUME),
        ({"batch": 2}, Reason.OTHER_FORM),
        ({"batch": 1, "dtype": "float64"}, Reason.OTHER_FORM),
    ],
)
def test_a_single_volume_is_told_to_be_in_another_layout_than_several(
    changes: dict[str, Any], reason: Reason
) -> None:
    volumes = a_convolution(
        batch=4,
        input_size=(5,) * 3,
        kernel_size=(3,) * 3,
        stride=(1,) * 3,
        padding=(1,) * 3,
        dilation=(1,) * 3,
    )
    tuned, told = dataclasses.replace(volumes, layout=Layout.CHANNELS_LAST), _Told()

    with pytest.warns(UntunedWarning, match="was tuned for .* channels_last, .*but meets .* contiguous"):
        served = _shapes(_variant(tuned), notice=told).convolution(
            CpuBackend(), dataclasses.replace(volumes, **changes)
        )

    assert (served, told.reasons) == (None, [reason])


class _Learner:
    """Tunes what it is asked for, in some time, and notes what that is."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.asked: list[tuple[int, tuple[ConvOp, ...]]] = []
        self._takes_s = takes_s

    def __call__(
        self, device: torch.device, path: str, number: int, problem: ConvProblem, ops: tuple[ConvOp, ...]
    ) -> Plan:
        self.asked.append((number, ops))
        time.sleep(self._takes_s)
        return _plan_of(_variant(problem, number=number))


def _plan_of(variant: Variant) -> Plan:
    assignments = tuple(variant.assignments.values())
    return Plan(Mode.REUSE, Policy.UNDIVIDED, 2**30, CpuBackend().environment(), assignments, (), "0")


def test_a_shape_that_is_met_is_tuned_for_what_the_others_were() -> None:
    learner = _Learner()

    assert _shapes(_variant(PIXELS), learn=learner).convolution(CpuBackend(), IMAGE) is not None

    assert learner.asked == [(1, (ConvOp.FPROP,))]


def test_a_shape_that_two_threads_meet_at_once_is_tuned_once() -> None:
    learner = _Learner(takes_s=0.2)
    shapes = _shapes(_variant(PIXELS), learn=learner)
    threads = [threading.Thread(target=shapes.convolution, args=(CpuBackend(), IMAGE)) for _ in range(2)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(learner.asked) == len(shapes.learnt) == 1


@pytest.mark.parametrize("kind", [UnmeasuredError, UnweighableError])
def test_a_shape_that_cannot_be_measured_stays_as_it_is_with_a_warning(kind: type[BackendError]) -> None:
    def fail(*_: object) -> Plan:
        raise kind("no room to measure")

    with pytest.warns(UntunedWarning, match="'conv' stays as it is for .*: no room to measure"):
        assert _shapes(_variant(PIXELS), learn=fail).convolution(CpuBackend(), IMAGE) is None


def test_in_sharing_mode_each_shape_owns_a_workspace_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.patching.shapes.divided", lambda *given: given[4])
    backend = CpuBackend()

    def owner(shapes: TunedShapes, problem: ConvProblem) -> object:
        owners: Any = shapes.convolution(backend, problem)
        return owners.get(ConvOp.FPROP)

    variants = _variant(PIXELS), _variant(IMAGE, number=1)
    sharing = _shapes(*variants, is_sharing=True)
    first, second = owner(sharing, PIXELS), owner(sharing, IMAGE)

    assert None not in (first, second)
    assert first is owner(sharing, PIXELS.with_batch(2))
    assert first is not second
    assert owner(_shapes(*variants), PIXELS) is None


def test_an_environment_that_was_found_to_be_the_plan_s_is_not_looked_at_again() -> None:
    class Counting(CpuBackend):
        looks = 0

        def environment(self) -> Environment:
            self.looks += 1
            return super().environment()

    backend = Counting()
    shapes = _shapes(_variant(PIXELS), _variant(IMAGE, number=1))
    shapes.__setstate__(shapes.__getstate__())

    for problem in (PIXELS, IMAGE, PIXELS):
        assert shapes.convolution(backend, problem) is not None

    assert backend.looks == 1
