"""The training steps that are measured: which networks, on what, and which speed-ups are wanted."""

import dataclasses
import itertools
from collections.abc import Collection, Sequence

from bench.cpu.settings import ONE, SETTINGS, TWO, TWO_SPINNING_LESS
from bench.cpu.step_lines import StepCase
from mucudnn.problem import Layout

LIMIT_BYTES = 16 * 2**20
"""Of each convolution's workspace: the limit of the targets."""

_LIMIT_OF_VOLUMES = 64 * 2**20
"""Within 16 MiB nothing fits, on two threads, at a weight gradient of the 3-D U-Net of 768 channels."""

_DIGITS = (
    "scikit-learn's handwritten digits, enlarged to 3x32x32, in memory; each step gathers its batch in a "
    "shuffled order and lays it out"
)
_MOSAICS = (
    "mosaics of 4x4 handwritten digits, ink against paper, in memory; each step gathers its batch in a "
    "shuffled order and lays it out"
)
_STACKS = (
    "stacks of 32 handwritten digits, ink against paper, in memory; each step gathers its batch in a "
    "shuffled order and lays it out"
)
_NOISE = "normal random images, in memory"


@dataclasses.dataclass(frozen=True)
class Network:
    """A network with what it is trained on.

    Attributes:
        name: for tables and options.
        recipe: `module:function` that returns its `bench.cpu.step_models.Recipe`.
        source: where it comes from, and why its sizes are usual.
        data: what it reads, and where that lies.
        limit_bytes: of each convolution's workspace.
    """

    name: str
    recipe: str
    source: str
    data: str
    limit_bytes: int = LIMIT_BYTES


_MODELS = "bench.cpu.step_models"

NETWORKS: tuple[Network, ...] = (
    Network(
        "resnet18",
        f"{_MODELS}:resnet18_on_digits",
        "ResNet-18 (He et al. 2016), batch 64, images of 32x32, the size of CIFAR-10",
        _DIGITS,
    ),
    Network(
        "vgg11",
        f"{_MODELS}:vgg11_on_digits",
        "VGG-11 with batch norm (Simonyan and Zisserman 2015), batch 64, images of 32x32 as above",
        _DIGITS,
    ),
    Network(
        "unet",
        f"{_MODELS}:unet_on_mosaics",
        "2-D U-Net with padding and batch norm, 64 channels and more (Ronneberger et al. 2015), batch 4, "
        "patches of 128x128: small ones, as are cut from larger images where memory is short",
        _MOSAICS,
    ),
    Network(
        "unet3d",
        f"{_MODELS}:unet3d_on_stacks",
        "3-D U-Net with padding and batch norm, 32 channels and more (Çiçek et al. 2016), batch 2, volumes "
        "of 32x32x32",
        _STACKS,
        _LIMIT_OF_VOLUMES,
    ),
    Network(
        "resnet18-224",
        f"{_MODELS}:resnet18_on_noise",
        "ResNet-18 (He et al. 2016), batch 16, images of 224x224, the size of ImageNet",
        _NOISE,
    ),
    Network(
        "resnet50",
        f"{_MODELS}:resnet50_on_noise",
        "ResNet-50 (He et al. 2016; stride in the 3x3 convolutions), batch 8 in training, images of 224x224, "
        "the size of ImageNet",
        _NOISE,
    ),
    Network(
        "mobilenetv2",
        f"{_MODELS}:mobilenetv2_on_noise",
        "MobileNetV2 (Sandler et al. 2018), batch 16, images of 224x224: depthwise filters of 3x3",
        _NOISE,
    ),
    Network(
        "efficientnet-b0",
        f"{_MODELS}:efficientnet_on_noise",
        "EfficientNet-B0 (Tan and Le 2019), batch 16, images of 224x224: depthwise filters of 3x3 and 5x5",
        _NOISE,
    ),
    Network(
        "convnext-t",
        f"{_MODELS}:convnext_on_noise",
        "ConvNeXt-T (Liu et al. 2022), batch 8, images of 224x224: depthwise filters of 7x7",
        _NOISE,
    ),
)
"""In the order in which they are measured: the first is the one that has targets."""


_LAYOUTS = (Layout.CHANNELS_LAST, Layout.CONTIGUOUS)
"""The one in which PyTorch's own is faster comes first."""


@dataclasses.dataclass(frozen=True)
class StepAim:
    """A speed-up of a whole step that is wanted.

    Attributes:
        case: of which.
        wanted: the least speed-up that reaches the target.
    """

    case: StepCase
    wanted: float


AIMS: tuple[StepAim, ...] = tuple(
    StepAim(StepCase(setting.name, "resnet18", layout), wanted)
    for layout, wanted in ((Layout.CHANNELS_LAST, 1.35), (Layout.CONTIGUOUS, 1.25))
    for setting in (ONE, TWO, TWO_SPINNING_LESS)
)


def cases_of(
    networks: Sequence[Network], settings: Collection[str], layouts: Collection[Layout]
) -> list[StepCase]:
    """Return the cases in their order: should the time run out, the first networks are complete."""
    every = itertools.product(networks, SETTINGS, _LAYOUTS)
    return [
        StepCase(setting, network.name, layout)
        for network, setting, layout in every
        if setting in settings and layout in layouts
    ]
