"""Which of the shapes that a module was tuned for serves a call."""

import dataclasses

import pytest
import torch

from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.convolutions.notices import Notice
from mucudnn.errors import UntunedWarning
from mucudnn.patching.fitting import Memory
from mucudnn.patching.shapes import TunedShapes, Variant
from mucudnn.problem import ConvProblem, Layout
from tests.operands import a_convolution

PIXELS = a_convolution(batch=4, input_size=(1, 1))
LAST = dataclasses.replace(PIXELS, layout=Layout.CHANNELS_LAST)


def serves(problem: ConvProblem, *tuned: ConvProblem) -> int | None:
    """The place of the shape that serves a problem, seen by what each holds when frozen; None for none."""
    backend = CpuBackend()
    memory = Memory(backend.environment(), backend.own, False, 0, 0, 0)  # noqa: FBT003  # not in sharing mode
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
    memory = Memory(elsewhere, backend.own, False, 0, 0, 0)  # noqa: FBT003  # not in sharing mode
    shapes = TunedShapes("conv", (Variant(PIXELS, {}),), memory, Notice(), home=None)

    with pytest.warns(UntunedWarning, match="'conv' cannot be divided here .* in another environment"):
        served = [shapes.convolution(backend, PIXELS) for _ in range(3)]

    assert served == [None] * 3


def test_calls_on_another_kind_of_device_are_told_of_unless_they_have_no_values() -> None:
    backend = CpuBackend()
    memory = Memory(backend.environment(), backend.own, False, 0, 0, 0)  # noqa: FBT003  # not in sharing mode
    shapes = TunedShapes("conv", (Variant(PIXELS, {}),), memory, Notice(), backend.flags())

    for kind in ("cpu", "meta"):
        shapes.tell_device(torch.device(kind))
    with pytest.warns(UntunedWarning, match="'conv' was tuned for the backend 'cpu', but computes on cuda"):
        shapes.tell_device(torch.device("cuda"))
