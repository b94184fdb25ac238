"""A model that is examined in earnest, since it looks at values, is left as it was, and so is its sample."""

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import FlopCounterMode

import mucudnn
from mucudnn.convolutions.strides import layout_of
from mucudnn.errors import SampleError, UntunedWarning
from mucudnn.examining.extraction import extract

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Looking(nn.Module):
    """Looks at the values of what its convolution gives, and does something with them."""

    def __init__(self, then: Callable[["Looking", Tensor], Tensor | None], **attributes: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.then = then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, image: Tensor) -> Tensor:
        y: Tensor = self.conv(image)
        if not y.isfinite().all().item():
            raise ValueError("the image must be finite")
        changed = self.then(self, y)
        return y if changed is None else changed


def keep(model: Looking, y: Tensor) -> Tensor:
    model.bank.append(y.mean().detach())
    return y + torch.stack(model.bank).sum()


def keep_by_name(model: Looking, y: Tensor) -> Tensor:
    known = len(model.known)
    model.known["last"] = [y.detach()]
    return y + known


def count(model: Looking, y: Tensor) -> Tensor:
    model.steps += 1
    return y * model.steps


def draw(model: Looking, y: Tensor) -> Tensor:
    return y + torch.rand(1, generator=model.generator)


def shift(model: Looking, y: Tensor) -> None:
    model.conv.bias.data.copy_(y.mean())


def follow(model: Looking, y: Tensor) -> None:
    with torch.no_grad():
        for parameter in model.follower.parameters():
            parameter.mul_(0.9)


def draw_by_place(model: Looking, y: Tensor) -> Tensor:
    return y + torch.poisson(torch.full((1,), 9.0), generator=model.generator)


def bind_anew(model: Looking, y: Tensor) -> None:
    model.conv.bias.data = model.conv.bias.data + y.mean()


@pytest.mark.parametrize(
    ("then", "attributes"),
    [
        (draw_by_place, lambda: {"generator": torch.Generator().manual_seed(3)}),
        (bind_anew, dict),
        (keep, lambda: {"bank": []}),
        (keep_by_name, lambda: {"known": {}}),
        (count, lambda: {"steps": torch.zeros(1)}),
        (draw, lambda: {"generator": torch.Generator().manual_seed(3)}),
        (shift, dict),
        (follow, lambda: {"follower": nn.Linear(2, 2)}),
    ],
)
def test_what_a_pass_in_earnest_changes_is_put_back(
    then: Callable[[Looking, Tensor], Tensor | None], attributes: Callable[[], dict[str, Any]]
) -> None:
    torch.manual_seed(0)
    model = Looking(then, **attributes())
    twin = Looking(then, **attributes())
    twin.load_state_dict(model.state_dict())

    extract(model, IMAGES)

    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    for _ in range(2):
        assert torch.equal(model(IMAGES), twin(IMAGES))


def enlarge(model: Looking, y: Tensor) -> None:
    model.queue.resize_(y.numel()).copy_(y.detach().flatten())


@pytest.mark.parametrize(
    ("then", "buffer"),
    [(lambda *_: None, torch.ones(1).expand(4)), (enlarge, torch.zeros(0))],
    ids=["expanded", "resized"],
)
def test_buffers_of_every_kind_are_put_back(
    then: Callable[[Looking, Tensor], Tensor | None], buffer: Tensor
) -> None:
    model = Looking(then)
    model.register_buffer("queue", buffer)
    before = buffer.clone()

    extract(model, IMAGES)

    assert model.queue is buffer
    assert torch.equal(buffer, before)


def unseen_by_dispatchers(buffer: Tensor) -> Tensor:
    buffer.numpy()[:] += 1
    return buffer


def from_another_thread(buffer: Tensor) -> Tensor:
    thread = threading.Thread(target=buffer.add_, args=(1,))
    thread.start()
    thread.join()
    return buffer


def in_place(buffer: Tensor) -> Tensor:
    return buffer.mul_(2)


@pytest.mark.parametrize(
    ("write", "made"),
    [
        (unseen_by_dispatchers, torch.ones(3)),
        (from_another_thread, torch.ones(3)),
        (in_place, torch.eye(3).to_sparse()),
        (in_place, torch.ones(3, dtype=torch.complex64).conj()),
    ],
    ids=["by NumPy", "by another thread", "sparse", "conjugated"],
)
def test_buffers_are_put_back_whoever_writes_to_them(write: Callable[[Tensor], Tensor], made: Tensor) -> None:
    def then(model: Looking, y: Tensor) -> Tensor:
        return y + write(model.kept).to_dense().abs().sum()

    model, before = Looking(then), made.clone()
    model.register_buffer("kept", made)

    extract(model, IMAGES)

    assert model.kept is made
    assert torch.equal(made.to_dense(), before.to_dense())


def test_nothing_of_the_examined_sample_is_kept() -> None:
    class Remembering(Looking):
        def forward(self, image: Tensor) -> Tensor:
            self.seen += [image, image[0], torch.tensor(1.0)]
            return super().forward(image)

    model = Remembering(lambda *_: None, seen=[])

    extract(model, IMAGES)

    assert model.seen == []


def test_a_model_with_an_operator_of_a_higher_order_is_examined() -> None:
    def then(_: Looking, y: Tensor) -> Tensor:
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's, of its own
        assert [call.path for call in extract(Looking(then), IMAGES).calls] == ["conv"]


@dataclasses.dataclass
class Batch:
    image: Tensor


class OfBatches(Looking):
    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        batch.image.sub_(1)
        return super().forward(batch.image)


def test_tensors_in_whatever_the_arguments_are_made_of_are_left_as_they_were() -> None:
    batch = Batch(IMAGES.clone())

    extract(OfBatches(lambda *_: None), batch)

    assert torch.equal(batch.image, IMAGES)


class Making(nn.Module):
    """Makes a part of itself in its first call."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.conv, self.looks, self.head = nn.Conv2d(3, 4, 3), looks, None

    def forward(self, image: Tensor) -> Tensor:
        y = self.conv(image).flatten(1)
        if self.looks and y.sum().item() > 1e9:
            return y
        if self.head is None:
            self.head = nn.Linear(y.shape[1], 2)
            self.register_buffer("seen", torch.zeros(1), persistent=False)
        return self.head(y)


@pytest.mark.parametrize("looks", [False, True])
def test_parts_that_a_pass_has_made_are_taken_out_again(looks: bool) -> None:
    model = Making(looks)
    before = copy.deepcopy(model.__dict__)

    extract(model, IMAGES)

    assert [*model.state_dict()] == ["conv.weight", "conv.bias"]
    assert model.__dict__.keys() == before.keys()
    assert (model.head, [*model._modules], model._non_persistent_buffers_set) == (None, ["conv"], set())
    assert model(IMAGES).shape == (2, 2)


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, frames: Any) -> Tensor:
        return sum((self.conv(each).sum() for each in frames), torch.zeros(()))


@pytest.mark.parametrize(
    "sample_of",
    [lambda frames: (frames,), lambda frames: {"frames": frames}, lambda frames: ([frames],)],
    ids=["by position", "by keyword", "within a list"],
)
def test_arguments_that_one_pass_uses_up_are_refused_before_it(sample_of: Callable[[object], object]) -> None:
    frames = iter([IMAGES, IMAGES])

    with pytest.raises(SampleError, match="holds an iterator, which one pass uses up: a list_iterator"):
        extract(Summing(), sample_of(frames))

    assert len([*frames]) == 2


def test_an_armed_model_leaves_such_arguments_to_the_model() -> None:
    model = Summing()
    expected = model([IMAGES, IMAGES])
    mucudnn.optimize(model, "1MiB", progress=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        results = [model(iter([IMAGES, IMAGES])) for _ in range(2)]

    assert [torch.equal(each, expected) for each in results] == [True, True]


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.LazyConv2d(4, 3)
        self.norm = nn.LazyInstanceNorm2d(affine=True, track_running_stats=True)
        self.calls, self.steps, self.last = 0, torch.zeros(1), None

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        self.last = self.norm(self.conv(image))
        return self.last


def test_lazy_modules_make_parameters_and_nothing_else_changes() -> None:
    model = Lazy()

    with FlopCounterMode(display=False) as counting:
        extract(model, IMAGES)

    assert model.conv.weight.shape == (4, 3, 3, 3)
    assert (model.calls, model.steps.item(), model.last) == (0, 0, None)
    assert torch.equal(model.norm.running_mean, torch.zeros(4))
    assert counting.get_total_flops() == 0


class Growing(LazyModuleMixin, nn.Module):
    """Makes a weight, fills a bias that it has, and adds a part, once it knows its channels."""

    cls_to_become = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = UninitializedParameter()
        self.bias = nn.Parameter(torch.full((4,), torch.nan))
        self.parts = nn.ModuleList()

    def initialize_parameters(self, image: Tensor) -> None:
        if self.has_uninitialized_params():
            with torch.no_grad():
                self.weight.materialize((4, image.shape[1], 3, 3))
                self.weight.fill_(0.1)
                self.bias.zero_()
            self.parts.append(nn.Conv2d(4, 2, 1))

    def forward(self, image: Tensor) -> Tensor:
        y = nn.functional.conv2d(image, self.weight, self.bias)
        return self.parts[0](y)


def test_what_a_lazy_module_makes_and_fills_beside_stays() -> None:
    model = nn.Sequential(Growing())

    extract(model, IMAGES)

    assert torch.equal(model[0].bias, torch.zeros(4))
    assert model(IMAGES).shape == (2, 2, 6, 6)


class Tokens(nn.Module):
    """Views tokens as an image again, as decoders of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8), nn.Conv2d(8, 8, 3)

    def forward(self, image: Tensor) -> Tensor:
        y = self.first(image)
        tokens = self.mix(y.flatten(2).transpose(1, 2))
        self.met = tokens.transpose(1, 2).reshape(y.shape)
        return self.last(self.met)


@pytest.mark.parametrize("batch", [1, 2])
def test_of_one_sample_views_have_the_layout_that_the_model_meets(batch: int) -> None:
    model = Tokens()

    problems = extract(model, IMAGES[:batch]).problems

    layout = next(problem.layout for site, problem in problems.items() if site.path == "last")
    model(IMAGES[:batch])
    assert layout == layout_of(model.met, model.last.weight)
