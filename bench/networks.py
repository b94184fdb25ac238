"""The networks of the demonstrations, written from their papers."""

from collections import OrderedDict

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


def _stage(number: int, width: int) -> nn.Sequential:
    """Return the blocks of stage `number`, from 1: each stage doubles the channels and halves the image."""
    k = width * 2 ** (number - 1)
    c, stride = (width, 1) if number == 1 else (k // 2, 2)
    rest = [BasicBlock(k, k, stride=1) for _ in range(BLOCKS_PER_STAGE - 1)]
    return nn.Sequential(BasicBlock(c, k, stride), *rest)


def _initialise(network: nn.Module) -> None:
    """Draw weights from a normal distribution of variance 2 / (inputs of one output); biases are 0.

    Source: He et al. 2015, "Delving deep into rectifiers", arXiv 1502.01852, equation 10.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
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
