"""Networks of depthwise convolutions, written from their papers, for images of 224 x 224."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

_STD = 0.02
"""Of ConvNeXt's first weights."""

_SCALE = 1e-6
"""Of a ConvNeXt block's part of the sum at first."""


def _convolution(c: int, k: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, whose padding keeps height and width where the stride is 1."""
    return nn.Conv2d(c, k, size, stride, size // 2, groups=groups, bias=False)


class _Gate(nn.Module):
    """Squeeze and excitation: each channel times a number between 0 and 1, found from the means of all.

    Source: Hu et al. 2017, arXiv 1709.01507, with SiLU in place of ReLU.
    """

    def __init__(self, c: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(c, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (n, c, h, w), gated."""
        means = nn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return torch.mul(x, self.excite(means).sigmoid())


class _Inverted(nn.Module):
    """An inverted bottleneck: widened, convolved depthwise, narrowed; added to x where it has its shape.

    x has shape (n, c, h, w), the result (n, k, h / stride, w / stride).
    Source: Sandler et al. 2018, arXiv 1801.04381, Table 1 and Figure 4.
    """

    def __init__(
        self, c: int, k: int, widening: int, size: int, stride: int, activation: type[nn.Module], gate: int
    ) -> None:
        super().__init__()
        wide = c * widening
        layers = OrderedDict[str, nn.Module]()
        if widening > 1:
            layers.update(widen=_convolution(c, wide, 1), norm1=nn.BatchNorm2d(wide), act1=activation())
        layers.update(
            depthwise=_convolution(wide, wide, size, stride, wide),
            norm2=nn.BatchNorm2d(wide),
            act2=activation(),
        )
        if gate:
            layers.update(gate=_Gate(wide, gate))
        layers.update(narrow=_convolution(wide, k, 1), norm3=nn.BatchNorm2d(k))
        self.layers = nn.Sequential(layers)
        self.is_sum = stride == 1 and c == k

    def forward(self, x: Tensor) -> Tensor:
        """Return the result."""
        y: Tensor = self.layers(x)
        return x + y if self.is_sum else y


def _of_inverted_bottlenecks(
    stages: tuple[tuple[int, int, int, int, int], ...],
    last: int,
    classes: int,
    activation: type[nn.Module],
    is_gated: bool,
) -> nn.Module:
    """Return stages of (widening, channels, blocks, stride, taps) behind a stem, with a head."""
    c = 32
    layers = OrderedDict[str, nn.Module](
        stem=_convolution(3, c, 3, 2), norm=nn.BatchNorm2d(c), act=activation()
    )
    for number, (widening, k, blocks, stride, size) in enumerate(stages, start=1):
        for block in range(blocks):
            step = stride if block == 0 else 1
            gate = max(c // 4, 1) if is_gated else 0
            layers[f"stage{number}_{block}"] = _Inverted(c, k, widening, size, step, activation, gate)
            c = k
    layers.update(head=_convolution(c, last, 1), head_norm=nn.BatchNorm2d(last), head_act=activation())
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), scores=nn.Linear(last, classes))
    network = nn.Sequential(layers)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return network


def mobilenetv2(classes: int = 1000) -> nn.Module:
    """Return MobileNetV2: (n, 3, 224, 224) to the (n, `classes`) scores before softmax.

    Sandler et al. 2018, arXiv 1801.04381, Table 2, without dropout. Depthwise filters of 3 x 3.
    The weights come from torch's global random generator.
    """
    stages = (
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3),
        (6, 160, 3, 2, 3), (6, 320, 1, 1, 3),
    )  # fmt: skip
    return _of_inverted_bottlenecks(stages, 1280, classes, nn.ReLU6, is_gated=False)


def efficientnet_b0(classes: int = 1000) -> nn.Module:
    """Return EfficientNet-B0: (n, 3, 224, 224) to the (n, `classes`) scores before softmax.

    Tan and Le 2019, arXiv 1905.11946, Table 1, without dropout and stochastic depth. Depthwise filters of
    3 x 3 and 5 x 5. The weights come from torch's global random generator.
    """
    stages = (
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
    )  # fmt: skip
    return _of_inverted_bottlenecks(stages, 1280, classes, nn.SiLU, is_gated=True)


class _LayerNorm(nn.LayerNorm):
    """Normalises the channels of each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (n, c, h, w), normalised."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Block(nn.Module):
    """A block of ConvNeXt: depthwise 7 x 7, then two linear layers for each pixel, added to x.

    Source: Liu et al. 2022, arXiv 2201.03545, Figure 4, without stochastic depth.
    """

    def __init__(self, c: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.norm = nn.LayerNorm(c, eps=1e-6)
        self.widen = nn.Linear(c, 4 * c)
        self.narrow = nn.Linear(4 * c, c)
        self.scale = nn.Parameter(torch.full((c,), _SCALE))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, of the shape (n, c, h, w) that x has."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(nn.functional.gelu(self.widen(y)))
        return torch.add(x, y.permute(0, 3, 1, 2))


def convnext_tiny(classes: int = 1000) -> nn.Module:
    """Return ConvNeXt-T: (n, 3, 224, 224) to the (n, `classes`) scores before softmax.

    Liu et al. 2022, arXiv 2201.03545, section 3 and Table 9. Depthwise filters of 7 x 7.
    The weights come from torch's global random generator.
    """
    widths = (96, 192, 384, 768)
    layers = OrderedDict[str, nn.Module](stem=nn.Conv2d(3, widths[0], 4, stride=4))
    layers["norm"] = _LayerNorm(widths[0], eps=1e-6)
    for number, (c, blocks) in enumerate(zip(widths, (3, 3, 9, 3), strict=True), start=1):
        if number > 1:
            layers[f"norm{number}"] = _LayerNorm(c // 2, eps=1e-6)
            layers[f"shrink{number}"] = nn.Conv2d(c // 2, c, 2, stride=2)
        for block in range(blocks):
            layers[f"stage{number}_{block}"] = _Block(c)
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    layers.update(last_norm=nn.LayerNorm(widths[-1], eps=1e-6), scores=nn.Linear(widths[-1], classes))
    network = nn.Sequential(layers)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=_STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network
