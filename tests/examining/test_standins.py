"""Stand-ins have the strides that tensors with values have, of whatever is computed."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.examining.extraction import extract
from mucudnn.examining.standins import StandIns

Function = Callable[..., Tensor]


def strides_of_stand_ins(function: Function, *images: Tensor) -> tuple[int, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        stand_ins = [mode.from_tensor(image) for image in images]
        with StandIns():
            return function(*stand_ins).stride()


def images_of(rank: int) -> list[Tensor]:
    """Images in all kinds of strides: of one sample and of several, of one channel and of several."""
    order, size = (torch.channels_last, torch.channels_last_3d)[rank - 2], (2, 3, 4)[-rank:]
    elements = torch.Size(size).numel()
    several = torch.rand(2, 3, *size)
    last = torch.rand(1, 3, *size).contiguous(memory_format=order)
    one_channel = torch.rand(2, 1, *size)
    return [
        several,
        several.contiguous(memory_format=order),
        several.movedim(1, -2).contiguous().movedim(-2, 1),
        last,
        last.as_strided(last.shape, (3, *last.stride()[1:])),
        last.as_strided(last.shape, (1, *last.stride()[1:])),
        torch.rand(1, 3, *size),
        one_channel,
        one_channel.as_strided(one_channel.shape, (elements, 1, *one_channel.stride()[2:])),
        several[..., 1:],
        several.contiguous(memory_format=order)[:, 1:],
        several.contiguous(memory_format=order)[:, :1],
        several.contiguous(memory_format=order)[..., 1:],
    ]


OF_ANY_RANK: dict[str, Function] = {
    "add": lambda image: image + image.contiguous(),
    "add a number": lambda image: image + 1,
    "add to a number": lambda image: torch.ops.aten.add.Scalar(image, 1),
    "adjust channels": lambda image: image * torch.rand(image.shape[1], *(1,) * (image.dim() - 2)),
    "attention": lambda image: image * image.mean(1, keepdim=True).sigmoid(),
    "batch norm": lambda image: F.batch_norm(image, None, None, training=True),
    "bring to one type": lambda image: image.half(),
    "clamp": lambda image: image.clamp(0, 1),
    "clone": torch.clone,
    "concatenate": lambda image: torch.cat([image, image], 1),
    "contiguous": torch.Tensor.contiguous,
    "dropout": F.dropout,
    "divide to a whole number": lambda image: image // 2,
    "flip": lambda image: image.flip(-1),
    "gelu": F.gelu,
    "glu": lambda image: F.glu(torch.cat([image, image], 1), 1),
    "group norm": lambda image: F.group_norm(image, 1),
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "instance norm": F.instance_norm,
    "layer norm": lambda image: F.layer_norm(image, image.shape[1:]),
    "leaky relu": F.leaky_relu,
    "lerp": lambda image: torch.lerp(image.contiguous(), image, 0.5),
    "log softmax": lambda image: image.log_softmax(1),
    "masked fill": lambda image: image.masked_fill(image > 0, 0),
    "power": lambda image: 2**image,
    "prelu": lambda image: F.prelu(image, torch.ones(1)),
    "relu": F.relu,
    "remainder of a number": lambda image: torch.remainder(2, image),
    "softmax": lambda image: image.softmax(1),
    "square": lambda image: image**2,
    "tokens": lambda image: image.flatten(2).mT.contiguous().mT.reshape(image.shape),
    "upsample": lambda image: F.interpolate(image, scale_factor=2),
    "upsample exactly": lambda image: F.interpolate(image, scale_factor=2, mode="nearest-exact"),
    "where": lambda image: torch.where(image > 0, image, 0.0),
    "zeros like": torch.zeros_like,
}

OF_TWO_AXES: dict[str, Function] = {
    "adaptive pool": lambda image: F.adaptive_avg_pool2d(image, (2, 2)),
    "max pool": lambda image: F.max_pool2d(image, 2),
    "pool": lambda image: F.avg_pool2d(image, 2),
    "upsample bicubically": lambda image: F.interpolate(image, scale_factor=2, mode="bicubic"),
    "upsample bilinearly": lambda image: F.interpolate(image, scale_factor=2, mode="bilinear"),
}

OF_THREE_AXES: dict[str, Function] = {
    "adaptive pool": lambda image: F.adaptive_avg_pool3d(image, (2, 2, 2)),
    "max pool": lambda image: F.max_pool3d(image, 2),
    "upsample trilinearly": lambda image: F.interpolate(image, scale_factor=2, mode="trilinear"),
}

OF_RANK = {2: OF_ANY_RANK | OF_TWO_AXES, 3: OF_ANY_RANK | OF_THREE_AXES}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(("rank", "name"), [(rank, name) for rank, of in OF_RANK.items() for name in of])
def test_strides_are_those_of_what_is_computed(rank: int, name: str, *, is_inference: bool) -> None:
    function = OF_RANK[rank][name]
    for image in images_of(rank):
        with torch.inference_mode(is_inference):
            assert strides_of_stand_ins(function, image) == function(image).stride(), image.stride()


OF_TWO: Sequence[Function] = [
    torch.add,
    torch.maximum,
    lambda one, other: torch.lerp(one, other, 0.5),
    lambda one, other: torch.where(one > other, one, other),
    lambda one, other: torch.addcmul(one, other, other),
]


def an_image(rng: random.Random, shape: Sequence[int]) -> Tensor:
    """An image of random strides, with any for lengths of 1."""
    order = rng.sample(range(len(shape)), len(shape))
    dense = torch.rand([shape[axis] for axis in order]).permute(*map(order.index, range(len(shape))))
    ones = (1, 7, 64, *dense.stride())
    pairs = zip(shape, dense.stride(), strict=True)
    strides = [rng.choice(ones) if length == 1 else stride for length, stride in pairs]
    return dense.as_strided(tuple(shape), strides)


@pytest.mark.parametrize("seed", range(20))
def test_strides_of_two_operands_are_those_of_what_is_computed(seed: int) -> None:
    rng = random.Random(seed)
    for function in OF_TWO * 8:
        shape = [rng.choice([1, 1, 2, 3]) for _ in range(rng.choice([3, 4, 4, 5]))]
        fewer = [1 if rng.random() < 0.2 else length for length in shape][rng.choice([0, 0, 1]) :]
        images = an_image(rng, shape), an_image(rng, rng.choice([shape, fewer]))

        found = strides_of_stand_ins(function, *images)

        assert found == function(*images).stride(), [(image.shape, image.stride()) for image in images]


class Counting(nn.Module):
    """Keeps a tensor of its first call, which is no buffer, and writes to it in later calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.count: Tensor | None = None

    def forward(self, image: Tensor) -> Tensor:
        self.count = image.new_zeros(1) if self.count is None else self.count.add_(1)
        result: Tensor = self.conv(image + self.count)
        return result


def test_what_was_kept_in_inference_mode_may_be_written_to_in_it() -> None:
    model, image = Counting().eval(), torch.rand(2, 3, 9, 9)

    with torch.inference_mode():
        model(image)
        calls = extract(model, image).calls

    assert [call.path for call in calls] == ["conv"]
    assert model.count == 0


class Einsum(nn.Module):
    """A convolution whose result, in autocast's type, meets a parameter in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.mix = nn.Parameter(torch.rand(5, 4))
        self.last = nn.Conv2d(5, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.last(torch.einsum("bchw,dc->bdhw", self.conv(image), self.mix))
        return result


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_autocast_sees_what_functions_are_composed_of(mode: Callable[[], Any]) -> None:
    model = Einsum().eval()

    with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        calls = extract(model, torch.rand(2, 3, 9, 9)).calls

    assert [call.problem.dtype for call in calls] == ["bfloat16", "bfloat16"]
