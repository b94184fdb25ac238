"""Small random networks, as people build them: a strategy for Hypothesis that draws them layer by layer."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by
from torch.nn.utils import parametrizations

Draw = st.DrawFn
Size = tuple[int, ...]

_CONVOLUTIONS: dict[int, type[Any]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, type[Any]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_BATCH_NORMS: dict[int, type[Any]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE_NORMS: dict[int, type[Any]] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_POOLS: dict[int, tuple[type[Any], type[Any]]] = {
    1: (nn.AvgPool1d, nn.MaxPool1d),
    2: (nn.AvgPool2d, nn.MaxPool2d),
    3: (nn.AvgPool3d, nn.MaxPool3d),
}
_ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh)
_ORDERS = {2: torch.channels_last, 3: torch.channels_last_3d}
_SIZES = {1: (8, 16), 2: (5, 9), 3: (4, 6)}
"""The least and the largest size of an image along an axis, by rank."""

_MOST_CHANNELS = 8
_MOST_POSITIONS = 128
"""Of an image that may still grow."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A network and what it is given.

    Attributes:
        model: in training mode, contiguous or channels last, in `dtype`.
        shape: of a mini-batch.
        dtype: float32 or float64.
        order: memory format of images.
        wants_gradient: whether the gradient of the images is wanted too.
    """

    model: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: torch.memory_format
    wants_gradient: bool

    def images(self, seed: int) -> Tensor:
        """Return a mini-batch of normal random values."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return images.contiguous(memory_format=self.order).requires_grad_(self.wants_gradient)


@st.composite
def architectures(draw: Draw, dtype: torch.dtype) -> Drawn:
    """Draw a network of one to four blocks, with at least one convolution."""
    rank = draw(st.sampled_from([2, 1, 3]))
    size = tuple(draw(st.integers(*_SIZES[rank])) for _ in range(rank))
    channels = draw(st.integers(1, _MOST_CHANNELS))
    batch = draw(st.integers(4, 8))  # each of which is divided
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [draw(_layer(channels, size))]
        for _ in range(draw(st.integers(0, 3))):
            blocks.append(draw(_block(*_after(nn.Sequential(*blocks), channels, size), depth=2)))
        model = nn.Sequential(*blocks)
        _scatter(model)
    order = torch.contiguous_format
    if rank in _ORDERS and draw(st.booleans()):
        order = _ORDERS[rank]
    model.to(dtype=dtype).to(memory_format=order)  # type: ignore[call-overload]  # not in the overloads
    return Drawn(model, (batch, channels, *size), dtype, order, draw(st.booleans()))


def _after(module: nn.Module, channels: int, size: Size) -> tuple[int, Size]:
    """Return channels and size of what a module makes of images; the module is left as it is."""
    output = copy.deepcopy(module).to("meta")(torch.empty((4, channels, *size), device="meta"))
    return output.shape[1], tuple(output.shape[2:])


def _scatter(model: nn.Module) -> None:
    """Take norms away from 0 and 1, so that what they make of equal numbers does not lie where ReLU bends."""
    for module in model.modules():
        if isinstance(module, (*_BATCH_NORMS.values(), *_INSTANCE_NORMS.values())):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)


class _Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class _Branches(nn.Module):
    """What several modules make of one image, side by side, and the image itself."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, *(branch(x) for branch in self.branches)], dim=1)


class _DownAndUp(nn.Module):
    """A convolution that makes images smaller, and a transposed one that is told the size they had."""

    def __init__(self, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.up = down, up

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.up(self.down(x), output_size=x.shape[2:])], dim=1)


class _Shared(nn.Module):
    """One module, twice in a row."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.once = module
        self.again = module

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.once(x)))


class _SharedWeight(nn.Module):
    """Two convolutions with one weight, and biases of their own."""

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__()
        self.one, self.other = one, other
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x).flip(-1)


class _TwoSizes(nn.Module):
    """One module on an image and on its half."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        half = self.module(x[..., : (x.shape[-1] + 1) // 2])
        return self.module(x) + F.pad(half, (0, x.shape[-1] - half.shape[-1]))


class _TwoBatches(nn.Module):
    """One module on the first sample, and on the others."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.module(x[:1]), self.module(x[1:])])


@st.composite
def _block(draw: Draw, channels: int, size: Size, depth: int) -> nn.Module:
    """Draw a part of a network; at most `depth` parts lie in one another."""
    kinds = ["layer", "down and up", "shared", "shared weight", "two sizes", "two batches"]
    kind = draw(st.sampled_from([*kinds, *(["residual", "branches"] if depth else [])]))
    kept = _convolution(channels, size, out=channels, keeps_size=True)
    if kind == "residual":
        return _Residual(draw(_body(channels, size, depth - 1)))
    if kind == "branches":
        number = draw(st.integers(1, 2))
        return _Branches([draw(_body(channels, size, depth - 1)) for _ in range(number)])
    if kind == "down and up" and min(size) > 2:
        return draw(_down_and_up(channels, size))
    if kind == "shared":
        return _Shared(draw(kept))
    if kind == "shared weight":
        one = draw(_convolution(channels, size, out=channels, keeps_size=True, is_plain=True))
        other = copy.deepcopy(one)
        if other.bias is not None:
            nn.init.uniform_(other.bias)
        return _SharedWeight(one, other)
    if kind == "two sizes" and size[-1] > 4:
        half = (*size[:-1], (size[-1] + 1) // 2)
        return _TwoSizes(draw(_convolution(channels, half, out=channels, keeps_size=True)))
    if kind == "two batches":
        return _TwoBatches(draw(kept))
    return draw(_layer(channels, size))


@st.composite
def _body(draw: Draw, channels: int, size: Size, depth: int) -> nn.Module:
    """Draw what keeps channels and size: convolutions in a row, some with a residual body between them."""
    first = draw(_convolution(channels, size, keeps_size=True))
    between, size_between = _after(first, channels, size)
    inner = [draw(_beside(between, size_between))]
    if depth and draw(st.booleans()):
        inner.append(_Residual(draw(_body(between, size, depth - 1))))
    return nn.Sequential(first, *inner, draw(_convolution(between, size, out=channels, keeps_size=True)))


@st.composite
def _down_and_up(draw: Draw, channels: int, size: Size) -> nn.Module:
    rank = len(size)
    between = draw(st.integers(1, _MOST_CHANNELS))
    bias = draw(st.booleans())
    down = _CONVOLUTIONS[rank](channels, between, 3, stride=2, padding=1, bias=bias)
    up = _TRANSPOSED[rank](between, draw(st.integers(1, 4)), 3, stride=2, padding=1, bias=not bias)
    return _DownAndUp(down, up)


@st.composite
def _layer(draw: Draw, channels: int, size: Size) -> nn.Module:
    """Draw a convolution and what comes after it: norm, activation, pool, dropout, each or none."""
    convolution = draw(_convolution(channels, size))
    between, size = _after(convolution, channels, size)
    layers = [convolution, draw(_beside(between, size))]
    if min(size) > 1 and draw(st.booleans()):
        layers.append(draw(st.sampled_from(_POOLS[len(size)]))(2, stride=draw(st.integers(1, 2))))
    if draw(st.integers(0, 7)) == 7:
        layers.append(nn.Dropout(0.25))
    return nn.Sequential(*layers)


@st.composite
def _beside(draw: Draw, channels: int, size: Size) -> nn.Module:
    """Draw a norm, an activation, both or none.

    No group norm: PyTorch 2.13's own gradient of one reads outside of its memory in channels last.
    """
    layers: list[nn.Module] = []
    norm = draw(st.sampled_from(["batch", "none", "instance"]))
    if norm == "batch":
        layers.append(_BATCH_NORMS[len(size)](channels))
    if norm == "instance" and math.prod(size) > 1:
        layers.append(_INSTANCE_NORMS[len(size)](channels, affine=True))
    if draw(st.booleans()):
        layers.append(draw(st.sampled_from(_ACTIVATIONS))())
    return nn.Sequential(*layers)


@st.composite
def _convolution(
    draw: Draw,
    channels: int,
    size: Size,
    out: int | None = None,
    *,
    keeps_size: bool = False,
    is_plain: bool = False,
) -> nn.Module:
    """Draw a convolution for images (n, `channels`, *`size`).

    Args:
        draw: of Hypothesis.
        channels: of its input.
        size: of its input.
        out: channels of its output; drawn where None.
        keeps_size: whether its output has the size of its input.
        is_plain: whether its weight is a parameter of its own, which learns.
    """
    groups = draw(st.sampled_from(_divisors(math.gcd(channels, channels if out is None else out))))
    if out is None:
        out = groups * draw(st.integers(1, max(1, _MOST_CHANNELS // groups)))
    is_transposed = draw(st.integers(0, 3)) == 3
    settings = draw((_transposed_settings if is_transposed else _settings)(size, keeps_size=keeps_size))
    kinds = _TRANSPOSED if is_transposed else _CONVOLUTIONS
    bias = draw(st.booleans())
    module: nn.Module = kinds[len(size)](channels, out, groups=groups, bias=bias, **settings)
    return module if is_plain else draw(_with_a_weight(module))


@st.composite
def _with_a_weight(draw: Draw, module: nn.Module) -> nn.Module:
    """Compute a convolution's weight, or freeze its parameters, or mostly leave it alone."""
    what = draw(
        st.sampled_from([*["nothing"] * 5, "weight norm", "spectral norm", "frozen weight", "frozen"])
    )
    if what == "weight norm":
        return parametrizations.weight_norm(module)
    if what == "spectral norm":
        return parametrizations.spectral_norm(module)
    if what == "frozen weight":
        module.get_parameter("weight").requires_grad_(requires_grad=False)
    if what == "frozen":
        module.requires_grad_(requires_grad=False)
    return module


@st.composite
def _settings(draw: Draw, size: Size, *, keeps_size: bool) -> dict[str, Any]:
    """Draw filter, stride, dilation and padding of a convolution of images of such a size."""
    mode = draw(st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]))
    named = draw(st.sampled_from([None, "same"] if keeps_size else [None, None, "same", "valid"]))
    if keeps_size and named is None:
        kernel = tuple(draw(st.sampled_from([3, 1])) for _ in size)
        dilation = tuple(draw(st.integers(1, 2)) for _ in size)
        padding: Any = tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
        stride = (1,) * len(size)
    elif named == "same":
        kernel = tuple(draw(st.integers(1, 3)) for _ in size)
        dilation = tuple(draw(st.integers(1, 2)) for _ in size)
        padding, stride = named, (1,) * len(size)
    else:
        pads = tuple(0 if named else draw(st.integers(0, min(2, each - 1))) for each in size)
        room = tuple(each + 2 * pad for each, pad in zip(size, pads, strict=True))
        kernel = tuple(draw(st.integers(1, min(3, each))) for each in room)
        dilation = tuple(
            draw(st.integers(1, 2 if k == 1 or 2 * (k - 1) < each else 1))
            for k, each in zip(kernel, room, strict=True)
        )
        padding, stride = named or pads, tuple(draw(st.integers(1, 2)) for _ in size)
    if min(size) < 3:
        mode = "zeros"  # the others must not pad by more than there is
    return {
        "kernel_size": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": padding,
        "padding_mode": mode,
    }


@st.composite
def _transposed_settings(draw: Draw, size: Size, *, keeps_size: bool) -> dict[str, Any]:
    """Draw filter, stride, dilation and paddings of a transposed convolution of images of such a size."""
    may_grow = math.prod(size) <= _MOST_POSITIONS
    kernel, stride, dilation, padding, output_padding = [], [], [], [], []
    for each in size:
        kernel.append(draw(st.sampled_from([3, 1] if keeps_size else [3, 1, 2])))
        dilation.append(draw(st.integers(1, 2)))
        stride.append(1 if keeps_size or not may_grow else draw(st.integers(1, 3)))
        reach = (kernel[-1] - 1) * dilation[-1]
        most = ((each - 1) * stride[-1] + reach) // 2  # what is left then is one position at least
        padding.append(reach // 2 if keeps_size else draw(st.integers(0, min(2, most))))
        output_padding.append(0 if keeps_size else draw(st.integers(0, stride[-1] - 1)))
    return {
        "kernel_size": tuple(kernel), "stride": tuple(stride), "dilation": tuple(dilation),
        "padding": tuple(padding), "output_padding": tuple(output_padding),
    }  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
