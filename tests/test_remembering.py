"""What models keep of a pass, anywhere, has values afterwards, or is forgotten."""

import collections
import functools
import gc
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from mucudnn.errors import ValuesWarning
from mucudnn.extraction import extract
from mucudnn.problem import ConvOp

GRIDS: dict[int, Tensor] = {}
SEEN: list[Tensor] = []
OUTSIDE: SimpleNamespace = SimpleNamespace(last=None)


@functools.lru_cache
def grid(size: int) -> Tensor:
    """Numbers alone: what a pass makes of them has values."""
    made = torch.arange(size, dtype=torch.float32)
    made /= size
    made[0] = 2.0
    return made


KEPT_BY_SAMPLE: dict[str, Tensor] = {}


@functools.lru_cache
def ones_like_sample(size: int) -> Tensor:
    return KEPT_BY_SAMPLE["sample"].new_ones(size)


class Keeper(nn.Module):
    """Adds what a function gives it to what a convolution gives."""

    def __init__(self, kept: Callable[["Keeper", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.cache: dict[str, Any] = {}
        self.slots: list[Tensor | None] = [None]
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.helper = SimpleNamespace(grid=None)
        self.count = [torch.zeros(1)]
        self._kept = kept

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image) + self._kept(self, image)


def by_function(_: Keeper, image: Tensor) -> Tensor:
    return grid(image.shape[-1])


def by_global(_: Keeper, image: Tensor) -> Tensor:
    return GRIDS.setdefault(image.shape[-1], image.new_ones(image.shape[-1]))


def by_dict(keeper: Keeper, image: Tensor) -> Tensor:
    return keeper.cache.setdefault("grid", torch.ones_like(image))


def by_nested(keeper: Keeper, image: Tensor) -> Tensor:
    found: list[Tensor] = keeper.cache.setdefault("grids", [torch.ones_like(image)])
    return found[0]


def by_slot(keeper: Keeper, image: Tensor) -> Tensor:
    if keeper.slots[0] is None:
        keeper.slots[0] = torch.ones_like(image)
    return keeper.slots[0]


def by_helper(keeper: Keeper, image: Tensor) -> Tensor:
    if keeper.helper.grid is None:
        keeper.helper.grid = torch.ones_like(image)
    grid: Tensor = keeper.helper.grid
    return grid


def by_deque(keeper: Keeper, image: Tensor) -> Tensor:
    keeper.recent.append(image.mean())
    return torch.stack([*keeper.recent]).mean()


def by_list(_: Keeper, image: Tensor) -> Tensor:
    SEEN.append(image.mean())
    return torch.stack(SEEN).mean()


def by_writing(keeper: Keeper, image: Tensor) -> Tensor:
    """Numbers, into which what depends on the image is written."""
    if "written" not in keeper.cache:
        made = torch.zeros(2)
        made[1] = image.mean()
        keeper.cache["written"] = made
    found: Tensor = keeper.cache["written"]
    return found.sum()


def by_counting(keeper: Keeper, image: Tensor) -> Tensor:
    """A tensor that was there before is written to."""
    keeper.count[0] += 1
    return keeper.count[0] * image.shape[0]


WAYS = (
    by_function, by_global, by_dict, by_nested, by_slot, by_helper, by_deque, by_list, by_writing,
    by_counting,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    for cache in (grid, ones_like_sample):
        cache.cache_clear()
    GRIDS.clear()
    SEEN.clear()
    yield
    OUTSIDE.last = None
    KEPT_BY_SAMPLE.clear()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_kept_anywhere_has_the_values_of_an_unexamined_model(
    way: Callable[[Keeper, Tensor], Tensor],
) -> None:
    image = torch.randn(2, 3, 4, 4)
    examined, twin = Keeper(way), Keeper(way)
    twin.load_state_dict(examined.state_dict())
    extract(examined, image)
    result = examined(image)
    grid.cache_clear()
    GRIDS.clear()
    SEEN.clear()
    assert type(result) is Tensor
    torch.testing.assert_close(result, twin(image), rtol=0, atol=0)


def test_a_cache_of_what_depends_on_the_image_is_cleared() -> None:
    def way(_: Keeper, image: Tensor) -> Tensor:
        KEPT_BY_SAMPLE["sample"] = image
        return ones_like_sample(4)

    extract(Keeper(way), torch.randn(2, 3, 4, 4))
    assert ones_like_sample.cache_info().currsize == 0
    assert not KEPT_BY_SAMPLE


def test_what_is_kept_where_nobody_looks_is_warned_of() -> None:
    def way(_: Keeper, image: Tensor) -> Tensor:
        OUTSIDE.last = image
        return image

    with pytest.warns(ValuesWarning, match="keeps 1 tensors without values"):
        extract(Keeper(way), torch.randn(2, 3, 4, 4))


def test_what_is_kept_nowhere_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    gc.disable()  # what lies in a cycle is nobody's either
    try:
        extract(Keeper(by_in_cycle), torch.randn(2, 3, 4, 4))
    finally:
        gc.enable()
    assert not recwarn.list


def by_in_cycle(_: Keeper, image: Tensor) -> Tensor:
    cycle: list[Any] = [image.mean()]
    cycle.append(cycle)
    return torch.zeros(())


def test_a_hook_keeps_no_stand_in() -> None:
    model, seen = nn.Sequential(nn.Conv2d(3, 3, 1)), {}

    def keep(_module: nn.Module, _args: object, result: Tensor) -> None:
        seen["result"] = result

    model[0].register_forward_hook(keep)
    extract(model, torch.randn(2, 3, 4, 4))
    assert not seen


def test_what_others_write_meanwhile_stays() -> None:
    log: dict[str, object] = {}
    model = Keeper(lambda _, image: image)
    model.cache["log"] = log

    def write(_module: nn.Module, _args: object) -> None:
        log["step"] = 1

    model.register_forward_pre_hook(write)
    extract(model, torch.randn(2, 3, 4, 4))
    assert log == {"step": 1}


def test_computed_weights_that_are_cached_have_values() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 3, 1)))
    image = torch.randn(2, 3, 4, 4)
    with parametrize.cached():
        extract(model, image)
        assert type(model(image)) is Tensor


def test_the_random_states_of_python_and_numpy_stay() -> None:
    def way(_: Keeper, image: Tensor) -> Tensor:
        return image * random.random() + float(np.random.rand()) + torch.rand(1)

    model, image = Keeper(way), torch.randn(2, 3, 4, 4)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    extract(model, image)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_what_trains_is_differentiated_though_inference_mode_is_on() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1))
    with torch.inference_mode():
        found = extract(model, torch.randn(2, 3, 4, 4))
        assert {call.path: call.ops for call in found.calls}["2"] == tuple(ConvOp)
        inference = extract(model.eval(), torch.randn(2, 3, 4, 4))
    assert {call.ops for call in inference.calls} == {(ConvOp.FPROP,)}


def test_autocast_keeps_no_stand_in(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        extract(model, torch.randn(2, 3, 4, 4))
        assert torch.is_autocast_cache_enabled()
    assert not recwarn.list


def test_a_generator_of_the_model_s_own_does_not_go_on() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    extract(Keeper(lambda _, image: image + torch.rand(1, generator=generator)), torch.randn(2, 3, 4, 4))
    assert torch.equal(generator.get_state(), before)
