"""The networks of the demonstrations, written from their papers."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

STAGES = 4
BLOCKS_PER_STAGE = 2


def conv_norm(c: int, k: int, size: int, stride: int) -> nn.Sequential:
    """Return a `size` x `size` convolution from `c` to `k` channels, then batch normalisation.

    The padding is the one with which stride 1 keeps height and width. There is no bias, since the
    normalisation would subtract it again.
    """
    conv = nn.Conv2d(c, k, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(k)))


class BasicBlock(nn.Module):
    """y = relu(F(x) + shortcut(x)), where F is two 3 x 3 convolutions, the first with the stride.

    x has shape (n, c, h, w), y has shape (n, k, h / stride, w / stride). The shortcut is the identity
    where both shapes agree, else a 1 x 1 convolution with the same stride (option B).
    Source: He et al. 2015, Figure 5 left and section 3.3.
    """

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(c, k, size=3, stride=stride)
        self.second = conv_norm(k, k, size=3, stride=1)
        keeps_shape = stride == 1 and c == k
        self.shortcut = nn.Identity() if keeps_shape else conv_norm(c, k, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        residual = self.second(nn.functional.relu(self.first(x)))
        return nn.functional.relu(residual + self.shortcut(x))


class Bottleneck(nn.Module):
    """y = relu(F(x) + shortcut(x)), where F narrows by 1 x 1, convolves by 3 x 3 and widens by 1 x 1.

    x has shape (n, c, h, w), y has shape (n, 4 `width`, h / stride, w / stride). The stride is that of the
    3 x 3 convolution, as in most public models; the shortcut is that of a `BasicBlock`.
    Source: He et al. 2015, Figure 5 right; the stride: Goyal et al. 2017, arXiv 1706.02677, section 5.1.
    """

    EXPANSION = 4

    def __init__(self, c: int, width: int, stride: int) -> None:
        super().__init__()
        k = self.EXPANSION * width
        self.narrow = conv_norm(c, width, size=1, stride=1)
        self.convolve = conv_norm(width, width, size=3, stride=stride)
        self.widen = conv_norm(width, k, size=1, stride=1)
        keeps_shape = stride == 1 and c == k
        self.shortcut = nn.Identity() if keeps_shape else conv_norm(c, k, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        narrowed = nn.functional.relu(self.narrow(x))
        residual = self.widen(nn.functional.relu(self.convolve(narrowed)))
        return nn.functional.relu(residual + self.shortcut(x))


def _stage(number: int, width: int) -> nn.Sequential:
    """Return the blocks of stage `number`, from 1: each stage doubles the channels and halves the image."""
    k = width * 2 ** (number - 1)
    c, stride = (width, 1) if number == 1 else (k // 2, 2)
    rest = [BasicBlock(k, k, stride=1) for _ in range(BLOCKS_PER_STAGE - 1)]
    return nn.Sequential(BasicBlock(c, k, stride), *rest)


_WEIGHTED = nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Linear


def _initialise(network: nn.Module) -> None:
    """Draw weights from a normal distribution of variance 2 / (inputs of one output); biases are 0.

    Source: He et al. 2015, "Delving deep into rectifiers", arXiv 1502.01852, equation 10.
    """
    for layer in network.modules():
        if isinstance(layer, _WEIGHTED):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def resnet18(classes: int = 10, width: int = 64) -> nn.Module:
    """Return ResNet-18 for small images: (n, 3, 32, 32) to the (n, `classes`) scores before softmax.

    The 18-layer column of Table 1 of He et al. 2015, arXiv 1512.03385, except for the beginning, which is
    that of section 4.2: one 3 x 3 convolution of stride 1 and no pooling, so that stage 1 sees the whole
    image and stage 4 still has 4 x 4 pixels. The stages have 1, 2, 4 and 8 times `width` channels.
    The weights come from torch's global random generator.
    """
    layers = OrderedDict[str, nn.Module](stem=conv_norm(3, width, size=3, stride=1), relu=nn.ReLU())
    layers.update((f"stage{number}", _stage(number, width)) for number in range(1, STAGES + 1))
    features = width * 2 ** (STAGES - 1)
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), scores=nn.Linear(features, classes))
    network = nn.Sequential(layers)
    _initialise(network)
    return network


def resnet18_224(classes: int = 1000) -> nn.Module:
    """Return ResNet-18: (n, 3, 224, 224) to the (n, `classes`) scores before softmax.

    The 18-layer column of Table 1 of He et al. 2015, arXiv 1512.03385.
    The weights come from torch's global random generator.
    """
    layers = _beginning()
    layers.update((f"stage{number}", _stage(number, 64)) for number in range(1, STAGES + 1))
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), scores=nn.Linear(512, classes))
    network = nn.Sequential(layers)
    _initialise(network)
    return network


def _beginning() -> OrderedDict[str, nn.Module]:
    """Return the layers with which residual networks for large images begin: (n, 3, h, w) to 64 channels."""
    return OrderedDict(
        stem=conv_norm(3, 64, size=7, stride=2), relu=nn.ReLU(), shrink=nn.MaxPool2d(3, stride=2, padding=1)
    )


def resnet50(classes: int = 1000) -> nn.Module:
    """Return ResNet-50: (n, 3, 224, 224) to the (n, `classes`) scores before softmax.

    The 50-layer column of Table 1 of He et al. 2015, arXiv 1512.03385.
    The weights come from torch's global random generator.
    """
    layers = _beginning()
    c = 64
    for number, blocks in enumerate((3, 4, 6, 3), start=1):
        width = 64 * 2 ** (number - 1)
        layers[f"stage{number}"] = _bottlenecks(c, width, blocks, stride=1 if number == 1 else 2)
        c = Bottleneck.EXPANSION * width
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), scores=nn.Linear(c, classes))
    network = nn.Sequential(layers)
    _initialise(network)
    return network


def _bottlenecks(c: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    rest = [Bottleneck(Bottleneck.EXPANSION * width, width, stride=1) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(c, width, stride), *rest)


def alexnet(classes: int = 1000) -> nn.Module:
    """Return AlexNet in one column: (n, 3, 224, 224) to the (n, `classes`) scores before softmax.

    Krizhevsky 2014, arXiv 1404.5997, note 1, which is the AlexNet of public models: 64, 192, 384, 256 and
    256 channels, with biases and without response normalisation. The weights come from torch's global random
    generator.
    """
    layers = OrderedDict[str, nn.Module](conv1=nn.Conv2d(3, 64, 11, 4, padding=2), relu1=nn.ReLU())
    layers.update(pool1=nn.MaxPool2d(3, 2), conv2=nn.Conv2d(64, 192, 5, padding=2), relu2=nn.ReLU())
    layers["pool2"] = nn.MaxPool2d(3, 2)
    for number, (c, k) in enumerate(((192, 384), (384, 256), (256, 256)), start=3):
        layers[f"conv{number}"] = nn.Conv2d(c, k, 3, padding=1)
        layers[f"relu{number}"] = nn.ReLU()
    layers.update(pool5=nn.MaxPool2d(3, 2), flatten=nn.Flatten())
    layers.update(drop5=nn.Dropout(0.5), full6=nn.Linear(256 * 6 * 6, 4096), relu6=nn.ReLU())
    layers.update(drop6=nn.Dropout(0.5), full7=nn.Linear(4096, 4096), relu7=nn.ReLU())
    layers["full8"] = nn.Linear(4096, classes)
    network = nn.Sequential(layers)
    _initialise(network)
    return network


class _Dense(nn.Module):
    """What a dense block adds one after the other: each layer sees all that was there before.

    x has shape (n, c, h, w), y has shape (n, c + `layers` · `growth`, h, w).
    """

    def __init__(self, c: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                OrderedDict(
                    norm=nn.BatchNorm2d(c + number * growth),
                    relu=nn.ReLU(),
                    conv=nn.Conv2d(c + number * growth, growth, 3, padding=1, bias=False),
                )
            )
            for number in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return x


def densenet40(classes: int = 10, growth: int = 40) -> nn.Module:
    """Return DenseNet-40: (n, 3, 32, 32) to the (n, `classes`) scores before softmax.

    Huang et al. 2016, arXiv 1608.06993, section 3 and 4.2, without bottlenecks: three blocks of twelve layers
    that each add `growth` channels, 40 as in the paper of µ-cuDNN. The weights come from torch's global
    random generator.
    """
    c, per_block = 16, 12
    layers = OrderedDict[str, nn.Module](stem=nn.Conv2d(3, c, 3, padding=1, bias=False))
    for number in (1, 2, 3):
        layers[f"block{number}"] = _Dense(c, growth, per_block)
        c += per_block * growth
        layers.update({f"norm{number}": nn.BatchNorm2d(c), f"relu{number}": nn.ReLU()})
        if number < 3:
            layers[f"conv{number}"] = nn.Conv2d(c, c, 1, bias=False)
            layers[f"pool{number}"] = nn.AvgPool2d(2)
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), scores=nn.Linear(c, classes))
    network = nn.Sequential(layers)
    _initialise(network)
    return network


def vgg16(classes: int = 1000) -> nn.Module:
    """Return VGG-16: (n, 3, 224, 224) to the (n, `classes`) scores before softmax.

    Configuration D of Table 1 of Simonyan and Zisserman 2014, arXiv 1409.1556: 3 x 3 convolutions with
    biases and without normalisation. They are called conv1_1 to conv5_3, as is usual.
    The weights come from torch's global random generator.
    """
    layers = OrderedDict[str, nn.Module]()
    c = 3
    for stage, (k, convolutions) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), start=1):
        for number in range(1, convolutions + 1):
            layers[f"conv{stage}_{number}"] = nn.Conv2d(c, k, 3, padding=1)
            layers[f"relu{stage}_{number}"] = nn.ReLU()
            c = k
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
    layers.update(flatten=nn.Flatten(), **_vgg_classifier(7 * 7 * c, 4096, classes))
    network = nn.Sequential(layers)
    _initialise(network)
    return network


def _vgg_classifier(features: int, hidden: int, classes: int) -> dict[str, nn.Module]:
    return {
        "full6": nn.Linear(features, hidden), "relu6": nn.ReLU(), "drop6": nn.Dropout(0.5),
        "full7": nn.Linear(hidden, hidden), "relu7": nn.ReLU(), "drop7": nn.Dropout(0.5),
        "full8": nn.Linear(hidden, classes),
    }  # fmt: skip


def vgg11(classes: int = 10, width: int = 64) -> nn.Module:
    """Return VGG-11 for small images: (n, 3, 32, 32) to the (n, `classes`) scores before softmax.

    Configuration A of Table 1 of Simonyan and Zisserman 2014, arXiv 1409.1556, with batch normalisation
    after every convolution. Five poolings leave one pixel of 32 x 32, so one linear layer takes the place of
    the paper's three, as is usual for images of this size. The stages have 1, 2, 4, 8 and 8 times `width`
    channels; the convolutions are called conv1_1 to conv5_2.
    The weights come from torch's global random generator.
    """
    layers = OrderedDict[str, nn.Module]()
    c = 3
    for stage, (widening, convolutions) in enumerate(((1, 1), (2, 1), (4, 2), (8, 2), (8, 2)), start=1):
        for number in range(1, convolutions + 1):
            layers[f"conv{stage}_{number}"] = conv_norm(c, widening * width, size=3, stride=1)
            layers[f"relu{stage}_{number}"] = nn.ReLU()
            c = widening * width
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
    layers.update(flatten=nn.Flatten(), scores=nn.Linear(c, classes))
    network = nn.Sequential(layers)
    _initialise(network)
    return network


class _UNet(nn.Module):
    """A U-Net of any dimension; whoever inherits says what its parts are.

    Each level but the lowest is pooled on the way down; on the way up, what was seen at a size is put before
    what is enlarged to it.
    """

    down: nn.ModuleList
    pool: nn.Module
    enlarge: nn.ModuleList
    up: nn.ModuleList
    scores: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        seen: list[Tensor] = []
        for level in self.down:
            x = level(self.pool(x) if seen else x)
            seen.append(x)
        for enlarge, level, skip in zip(self.enlarge, self.up, reversed(seen[:-1]), strict=True):
            x = level(torch.cat((skip, enlarge(x)), dim=1))
        scores: Tensor = self.scores(x)
        return scores


class UNet2d(_UNet):
    """A 2-D U-Net: (n, c, h, w) to the (n, `classes`, h, w) scores of every pixel before softmax.

    Going down, each level has two convolutions to its width; going up, a transposed convolution doubles the
    size and halves the channels. Unlike the paper's, the convolutions pad, so that sizes are kept, and batch
    normalisation follows each of them, as in most public models: h and w must be multiples of
    2^(levels - 1).
    Source: Ronneberger, Fischer and Brox 2015, arXiv 1505.04597, Figure 1.
    """

    def __init__(self, c: int, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        inputs = (c, *widths[:-1])
        self.down = nn.ModuleList(_pair(k, width) for k, width in zip(inputs, widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        steps = list(itertools.pairwise(reversed(widths)))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(below, k, 2, 2) for below, k in steps)
        self.up = nn.ModuleList(_pair(2 * k, k) for _, k in steps)
        self.scores = nn.Conv2d(widths[0], classes, 1)


def _pair(c: int, k: int) -> nn.Sequential:
    """Return two 3 x 3 convolutions, each normalised and rectified."""
    return nn.Sequential(
        OrderedDict(
            first=conv_norm(c, k, size=3, stride=1),
            relu1=nn.ReLU(),
            second=conv_norm(k, k, size=3, stride=1),
            relu2=nn.ReLU(),
        )
    )


def unet2d(channels: int = 1, classes: int = 2, width: int = 64) -> nn.Module:
    """Return the 2-D U-Net of the paper, padded and normalised: five levels, the first of `width` channels.

    The weights come from torch's global random generator.
    """
    network = UNet2d(channels, classes, [width * 2**level for level in range(5)])
    _initialise(network)
    return network


class UNet3d(_UNet):
    """A 3-D U-Net: (n, c, d, h, w) to the (n, `classes`, d, h, w) scores of every voxel before softmax.

    Going down, each level doubles its channels before it is pooled; going up, a transposed convolution
    doubles the size and what was seen at that size is appended. Unlike the paper's, the convolutions pad, as
    is usual in medical use, so that sizes are kept: d, h and w must be multiples of 2^(levels - 1).
    Source: Çiçek et al. 2016, arXiv 1606.06650, Figure 2.
    """

    def __init__(self, c: int, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        inputs = (c, *(2 * width for width in widths[:-1]))
        self.down = nn.ModuleList(_twice(k, w, 2 * w) for k, w in zip(inputs, widths, strict=True))
        self.pool = nn.MaxPool3d(2)
        rising = [2 * width for width in reversed(widths)]
        steps = list(itertools.pairwise(rising))
        self.enlarge = nn.ModuleList(nn.ConvTranspose3d(below, below, 2, 2, bias=False) for below, _ in steps)
        self.up = nn.ModuleList(_twice(below + k, k, k) for below, k in steps)
        self.scores = nn.Conv3d(2 * widths[0], classes, 1)


def _twice(c: int, middle: int, k: int) -> nn.Sequential:
    """Return two 3 x 3 x 3 convolutions, each with a bias, then normalised and rectified."""
    layers = OrderedDict[str, nn.Module]()
    for number, (inputs, outputs) in enumerate(((c, middle), (middle, k)), start=1):
        layers[f"conv{number}"] = nn.Conv3d(inputs, outputs, 3, padding=1)
        layers[f"norm{number}"] = nn.BatchNorm3d(outputs)
        layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)


def unet3d(channels: int = 3, classes: int = 3, width: int = 32) -> nn.Module:
    """Return the 3-D U-Net of the paper, padded: four levels, the first with `width` channels.

    The weights come from torch's global random generator.
    """
    network = UNet3d(channels, classes, [width * 2**level for level in range(4)])
    _initialise(network)
    return network
