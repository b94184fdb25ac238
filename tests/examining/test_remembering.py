"""What models keep of a pass, anywhere, has values afterwards, or is forgotten."""

import collections
import copy
import functools
import gc
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from mucudnn.errors import ValuesWarning
from mucudnn.examining.extraction import extract
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


@functools.cache
def many_ones_like_sample(size: int) -> tuple[Tensor, list[Tensor]]:
    ones = KEPT_BY_SAMPLE["sample"].new_ones(size)
    return ones, [ones + 1]


CACHES = (grid, ones_like_sample, many_ones_like_sample)


class Cache:
    kept: ClassVar[dict[str, Tensor]] = {}


class Keeper(nn.Module):
    """Adds what a function gives it to what a convolution gives."""

    def __init__(self, kept: Callable[["Keeper", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.cache: dict[str, Any] = {}
        self.slots: list[Tensor | None] = [None]
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.helper = SimpleNamespace(grid=None, size=None, is_ready=False, cache={})
        self.calls: list[torch.Size] = []
        self.sizes: collections.OrderedDict[torch.Size, int] = collections.OrderedDict()
        self.helper.means = collections.OrderedDict()
        self.count = [torch.zeros(1)]
        self.teacher = [torch.ones(1)]
        self.array = np.zeros(1, np.float32)
        self.hidden = [nn.BatchNorm1d(2)]
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


def by_class(_: Keeper, image: Tensor) -> Tensor:
    return Cache.kept.setdefault("ones", torch.ones_like(image))


def by_counting_in_a_view(keeper: Keeper, image: Tensor) -> Tensor:
    keeper.count[0].view(-1)[0] += 1
    keeper.count[0].data.mul_(2)
    return keeper.count[0] * image.shape[0]


def by_numpy(keeper: Keeper, image: Tensor) -> Tensor:
    """Memory of an array that stays."""
    torch.from_numpy(keeper.array).add_(1)
    return image * float(keeper.array[0])


def by_resizing(keeper: Keeper, image: Tensor) -> Tensor:
    keeper.count[0].resize_(6 * keeper.count[0].numel()).fill_(1)
    return keeper.count[0].sum() + image


def by_teaching(keeper: Keeper, image: Tensor) -> Tensor:
    """Weights that no module has, half of what they are taught."""
    (mean,) = keeper.teacher
    mean.mul_(0.5).add_(keeper.conv.weight.data.mean(), alpha=0.5)
    return mean * image


def by_used_memory(_: Keeper, image: Tensor) -> Tensor:
    """Numbers where there was something without values."""
    gone = torch.zeros(2)
    gone[1] = image.mean()
    del gone
    return GRIDS.setdefault(0, torch.tensor([1.0, 2.0])).sum()


def by_hidden_norm(keeper: Keeper, image: Tensor) -> Tensor:
    (norm,) = keeper.hidden
    norm(torch.ones(3, 2))
    return norm.running_mean.sum() + norm.num_batches_tracked + image


def by_counting(keeper: Keeper, image: Tensor) -> Tensor:
    """A tensor that was there before is written to."""
    keeper.count[0] += 1
    return keeper.count[0] * image.shape[0]


def by_key_in_helper(keeper: Keeper, image: Tensor) -> Tensor:
    """What was computed for the last size stays until another size comes."""
    if keeper.helper.size != image.shape[2:]:
        keeper.helper.size, keeper.helper.grid = image.shape[2:], image.mean() * image.shape[2]
    grid: Tensor = keeper.helper.grid
    return grid


def by_flag_in_dict(keeper: Keeper, image: Tensor) -> Tensor:
    if not keeper.cache.get("is_ready"):
        keeper.cache["is_ready"] = True
        keeper.cache["mean"] = image.mean()
    found: Tensor = keeper.cache["mean"]
    return found


def by_flag_beside_a_dict(keeper: Keeper, image: Tensor) -> Tensor:
    if not keeper.helper.is_ready:
        keeper.helper.is_ready = True
        keeper.helper.cache["mean"] = image.mean()
    found: Tensor = keeper.helper.cache["mean"]
    return found


def by_latest_sizes(keeper: Keeper, image: Tensor) -> Tensor:
    """The eldest of three goes when a fourth comes."""
    keeper.sizes[image.shape] = len(keeper.calls)
    if len(keeper.sizes) > 3:
        keeper.sizes.popitem(last=False)
    return torch.full((), float(len([*keeper.sizes])))


def by_latest_means(keeper: Keeper, image: Tensor) -> Tensor:
    means = keeper.helper.means
    means[image.shape] = image.mean()
    means.move_to_end(image.shape, last=False)
    return torch.stack([*means.values()]).mean()


def by_number_of_calls(keeper: Keeper, image: Tensor) -> Tensor:
    keeper.calls.append(image.shape)
    return torch.full((), float(len(keeper.calls)))


WAYS = (
    by_key_in_helper, by_flag_in_dict, by_flag_beside_a_dict, by_number_of_calls, by_latest_sizes,
    by_latest_means,
    by_function, by_global, by_dict, by_nested, by_slot, by_helper, by_deque, by_list, by_class, by_writing,
    by_counting, by_counting_in_a_view, by_numpy, by_resizing, by_teaching, by_used_memory, by_hidden_norm,
)  # fmt: skip


def _clear() -> None:
    for cache in CACHES:
        cache.cache_clear()
    for kept in (GRIDS, SEEN, Cache.kept):
        kept.clear()


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    _clear()
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
    other = torch.randn(2, 3, 8, 8)
    before = [examined(other), twin(other)] if way is by_key_in_helper else []
    extract(examined, image)
    result = examined(image)
    _clear()
    assert type(result) is Tensor
    torch.testing.assert_close(result, twin(image), rtol=0, atol=0)
    assert [*examined.sizes] == [*twin.sizes]
    assert all(torch.equal(each, before[0]) for each in before)


@pytest.mark.parametrize("cache", [ones_like_sample, many_ones_like_sample])
@pytest.mark.parametrize("looks_at_values", [False, True])
def test_a_cache_of_what_depends_on_the_image_is_cleared(
    cache: Any, looks_at_values: bool, recwarn: pytest.WarningsRecorder
) -> None:
    is_fake = []

    def way(_: Keeper, image: Tensor) -> Tensor:
        KEPT_BY_SAMPLE["sample"] = image
        found = cache(4)
        is_fake.append(type(found if isinstance(found, Tensor) else found[0]) is not Tensor)
        return image * 2 if looks_at_values and image.mean() > 0 else image

    extract(Keeper(way), torch.randn(2, 3, 4, 4))
    assert is_fake == [True, False][: 1 + looks_at_values]
    assert cache.cache_info().currsize == looks_at_values
    assert not recwarn.list


def test_what_user_classes_do_when_they_are_looked_into_is_not_done() -> None:
    class Moody(dict[str, Tensor]):
        def values(self) -> Any:
            raise RuntimeError("not now")

        def __len__(self) -> int:
            raise RuntimeError("not now")

    class Unbound:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not bound")

    model = Keeper(lambda _, image: image)
    model.cache |= {"moody": Moody(), "unbound": Unbound()}
    assert extract(model, torch.randn(2, 3, 4, 4)).calls


def test_noise_as_large_as_a_huge_image_is_not_drawn() -> None:
    image = torch.empty(2**20, 3, 2**10, 2**10, device="meta")
    assert extract(Keeper(lambda _, image: torch.randn(image.shape)), image).calls


def test_what_is_kept_where_nobody_looks_is_warned_of() -> None:
    def way(_: Keeper, image: Tensor) -> Tensor:
        OUTSIDE.last = image
        return image

    with pytest.warns(ValuesWarning, match=r"tensors without values \(1 of them\) were stored"):
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


def test_the_order_of_what_came_last_is_put_back() -> None:
    def way(keeper: Keeper, image: Tensor) -> Tensor:
        keeper.sizes.popitem(last=False)
        keeper.sizes[image.shape] = 0
        return image

    model = Keeper(way)
    model.sizes.update({torch.Size([number]): number for number in range(3)})
    extract(model, torch.randn(2, 3, 4, 4))

    assert [*model.sizes.items()] == [(torch.Size([number]), number) for number in range(3)]


class Hooking(nn.Module):
    """Registers hooks in its first call, once, and drops one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.once = self.conv.register_forward_pre_hook(lambda *_: None)
        self.is_ready = False

    def forward(self, image: Tensor) -> Tensor:
        if not self.is_ready:
            self.once.remove()
            self.conv.register_forward_hook(lambda _module, _inputs, result: result * 2, always_call=True)
            self.conv.register_full_backward_hook(lambda *_: None)
            self.conv.register_state_dict_post_hook(lambda *_: None)
            self.is_ready = True
        result: Tensor = self.conv(image)
        return result


@pytest.mark.parametrize("wants_values", [False, True])
def test_hooks_of_a_first_call_are_those_of_the_call_that_follows(*, wants_values: bool) -> None:
    model, image = Hooking(), torch.rand(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    if wants_values:
        model.register_forward_hook(lambda _module, _inputs, result: result.max().item() and None)

    extract(model, image)

    assert len(model.conv._forward_pre_hooks) == 1
    added = model.conv._forward_hooks, model.conv._backward_hooks, model.conv._state_dict_hooks
    assert added == ({}, {}, {})
    model(image)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(image), twin(image))
    assert (len(model.conv._forward_hooks), len(model.conv._forward_pre_hooks)) == (1, 0)
