"""The layers that are measured: shapes of published networks, with batches of 5 to 150 ms on a core."""

import dataclasses

from bench.deepbench_list import LAYERS
from mucudnn.problem import ConvOp, ConvProblem, Layout

_IMAGE_CHANNELS = 3
"""Channels up to which x is taken for a network's input, whose gradient nobody needs."""

_FROM_2D = 2
"""Spatial dimensions from which PyTorch has a channels_last format."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution in float32 with its mini-batch, without bias.

    Attributes:
        name: network and layer.
        source: where the shape comes from.
        batch: n.
        in_channels: c.
        input_size: spatial size of x.
        out_channels: k.
        kernel_size: taps of w along each dimension.
        stride: step of the filter along each dimension.
        padding: zeros on each side along each dimension.
        groups: number of groups.
        is_core: whether it is among the layers that are measured before all others.
    """

    name: str
    source: str
    batch: int
    in_channels: int
    input_size: tuple[int, ...]
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int = 1
    is_core: bool = True

    @property
    def ops(self) -> tuple[ConvOp, ...]:
        """The ops of a training step; the first layer of a network has no dgrad."""
        if self.in_channels <= _IMAGE_CHANNELS:
            return (ConvOp.FPROP, ConvOp.WGRAD)
        return (ConvOp.FPROP, ConvOp.DGRAD, ConvOp.WGRAD)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that PyTorch has for its tensors."""
        return tuple(Layout) if len(self.input_size) >= _FROM_2D else (Layout.CONTIGUOUS,)

    def problem(self, op: ConvOp, layout: Layout) -> ConvProblem:
        """Return one op of it; x, w and y have the same layout."""
        return ConvProblem(
            op=op,
            batch=self.batch,
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            input_size=self.input_size,
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=(1,) * len(self.input_size),
            groups=self.groups,
            layout=layout,
            filter_layout=layout,
        )


def _same(
    name: str,
    source: str,
    batch: int,
    channels: tuple[int, int],
    size: int | tuple[int, ...],
    taps: int,
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
) -> Layer:
    """Return a layer with equal numbers for all dimensions, two unless `size` has more; padding r // 2."""
    sizes = (size, size) if isinstance(size, int) else size
    rank = len(sizes)
    return Layer(
        name=name,
        source=source,
        batch=batch,
        in_channels=channels[0],
        input_size=sizes,
        out_channels=channels[1],
        kernel_size=(taps,) * rank,
        stride=(stride,) * rank,
        padding=(taps // 2 if padding is None else padding,) * rank,
        groups=groups,
    )


_VGG = "VGG-16, images of 224x224 (Simonyan and Zisserman 2015)"
_VGG_HALF = "VGG-16, images of 112x112 (Simonyan and Zisserman 2015)"
_RESNET18 = "ResNet-18, images of 224x224 (He et al. 2016)"
_CIFAR = "ResNet-18, images of 32x32 as in CIFAR-10 (He et al. 2016)"
_RESNET50 = "ResNet-50 v1.5, images of 224x224 (He et al. 2016)"
_ALEXNET = "AlexNet, single column (Krizhevsky 2014)"
_GOOGLENET = "GoogLeNet, 5x5 branch (Szegedy et al. 2015)"
_UNET = "U-Net with padding, images of 256x256 (Ronneberger et al. 2015)"
_UNET3D = "3-D U-Net (Cicek et al. 2016), on a patch of 32x64x64 voxels"
_CONVNEXT = "ConvNeXt-T, depthwise (Liu et al. 2022)"
_SWEEP = "no network: the taps grow while ResNet's 64 channels at 56x56 stay"
_REPLKNET = "RepLKNet-31B, depthwise (Ding et al. 2022)"

_THREE_BY_THREE = (
    _same("vgg16/conv1_2", _VGG, 2, (64, 64), 224, 3),
    _same("vgg16/conv2_1", _VGG, 4, (64, 128), 112, 3),
    _same("vgg16/conv2_2", _VGG, 2, (128, 128), 112, 3),
    _same("vgg16/conv3_1", _VGG, 4, (128, 256), 56, 3),
    _same("vgg16/conv3_2", _VGG, 2, (256, 256), 56, 3),
    _same("vgg16/conv4_1", _VGG, 4, (256, 512), 28, 3),
    _same("vgg16/conv4_2", _VGG, 4, (512, 512), 28, 3),
    _same("vgg16/conv5_1", _VGG, 16, (512, 512), 14, 3),
    _same("vgg16-112/conv1_2", _VGG_HALF, 8, (64, 64), 112, 3),
    _same("vgg16-112/conv2_2", _VGG_HALF, 8, (128, 128), 56, 3),
    _same("vgg16-112/conv3_2", _VGG_HALF, 8, (256, 256), 28, 3),
    _same("resnet18/layer1", _RESNET18, 16, (64, 64), 56, 3),
    _same("resnet18/layer2", _RESNET18, 16, (128, 128), 28, 3),
    _same("resnet18/layer3", _RESNET18, 32, (256, 256), 14, 3),
    _same("resnet18/layer4", _RESNET18, 32, (512, 512), 7, 3),
    _same("cifar-resnet18/layer1", _CIFAR, 64, (64, 64), 32, 3),
    _same("cifar-resnet18/layer2", _CIFAR, 64, (128, 128), 16, 3),
    _same("cifar-resnet18/layer3", _CIFAR, 64, (256, 256), 8, 3),
    _same("cifar-resnet18/layer4", _CIFAR, 64, (512, 512), 4, 3),
    _same("alexnet/conv3", _ALEXNET, 16, (192, 384), 13, 3),
    _same("alexnet/conv5", _ALEXNET, 16, (384, 256), 13, 3),
    _same("unet/level1", _UNET, 2, (64, 64), 256, 3),
    _same("unet/level3", _UNET, 2, (256, 256), 64, 3),
    _same("unet/level5", _UNET, 2, (1024, 1024), 16, 3),
)
"""Stride 1, at least 64 channels: where Winograd's algorithms should gain most."""

_OTHERS = (
    _same("alexnet/conv2", _ALEXNET, 16, (64, 192), 27, 5),
    _same("googlenet/3a", _GOOGLENET, 32, (16, 32), 28, 5),
    _same("googlenet/4e", _GOOGLENET, 32, (32, 128), 14, 5),
    _same("googlenet/5b", _GOOGLENET, 64, (48, 128), 7, 5),
    _same("sweep/9x9", _SWEEP, 4, (64, 64), 56, 9),
    _same("sweep/11x11", _SWEEP, 4, (64, 64), 56, 11),
    _same("sweep/15x15", _SWEEP, 4, (64, 64), 56, 15),
    _same("srresnet/output", "SRResNet, patches of 96x96 (Ledig et al. 2017)", 4, (64, 3), 96, 9),
    _same("replknet/stage1", _REPLKNET, 2, (128, 128), 56, 31, groups=128),
    _same("replknet/stage4", _REPLKNET, 8, (1024, 1024), 7, 13, groups=1024),
    _same("convnext/stage1", _CONVNEXT, 16, (96, 96), 56, 7, groups=96),
    _same("convnext/stage3", _CONVNEXT, 32, (384, 384), 14, 7, groups=384),
    _same("mobilenetv2/block3", "MobileNetV2 (Sandler et al. 2018)", 16, (144, 144), 56, 3, groups=144),
    _same("resnext50/conv2", "ResNeXt-50 32x4d (Xie et al. 2017)", 8, (128, 128), 56, 3, groups=32),
    _same("unet3d/level1", _UNET3D, 4, (32, 32), (16, 32, 32), 3),
    _same("unet3d/level2", _UNET3D, 2, (64, 64), (16, 32, 32), 3),
    _same("unet3d/level3", _UNET3D, 2, (128, 128), (8, 16, 16), 3),
    _same("resnet50/conv2_reduce", _RESNET50, 16, (256, 64), 56, 1),
    _same("resnet50/conv2_expand", _RESNET50, 8, (64, 256), 56, 1),
    _same("resnet50/conv3_reduce", _RESNET50, 16, (512, 128), 28, 1),
    _same("resnet50/conv4_reduce", _RESNET50, 16, (1024, 256), 14, 1),
    _same("resnet50/conv5_expand", _RESNET50, 16, (512, 2048), 7, 1),
    _same("resnet50/conv3_stride2", _RESNET50, 16, (128, 128), 56, 3, stride=2),
    _same("resnet18/layer2_stride2", _RESNET18, 16, (64, 128), 56, 3, stride=2),
    _same("resnet18/layer2_projection", _RESNET18, 16, (64, 128), 56, 1, stride=2),
    _same("cifar-resnet18/layer2_stride2", _CIFAR, 64, (64, 128), 32, 3, stride=2),
    _same("resnet18/conv1", _RESNET18, 8, (3, 64), 224, 7, stride=2),
    _same("cifar-resnet18/conv1", _CIFAR, 64, (3, 64), 32, 3),
    _same("vgg16/conv1_1", _VGG, 8, (3, 64), 224, 3),
    _same("alexnet/conv1", _ALEXNET, 16, (3, 64), 224, 11, stride=4, padding=2),
    _same("waveform/conv", "no network: 1-D, half a second of sound at 16 kHz", 8, (64, 64), (8000,), 9),
)
"""All other kinds: larger taps, depthwise and grouped, 3-D, 1x1, strided, few channels, 1-D."""


_CORE = (*_THREE_BY_THREE, *_OTHERS)

CHOSEN = frozenset(
    {"speech1_b4", "speech2_b4", "ocr4_b16", "face2_b8", "face4_b8", "vision8_b16", "vision13_b16"}
)
"""Of DeepBench's, measured with those of the other networks: shapes that none of them has, small enough."""


def _deepbench() -> tuple[Layer, ...]:
    """The layers of DeepBench, but for those that stand above under another name."""
    layers = [
        Layer(
            name=f"deepbench/{name}",
            source="DeepBench, training (Baidu Research, Apache-2.0)",
            batch=batch,
            in_channels=c,
            input_size=(h, w),
            out_channels=k,
            kernel_size=(r, s),
            stride=stride,
            padding=padding,
            is_core=name in CHOSEN,
        )
        for name, batch, c, (h, w), k, (r, s), padding, stride in LAYERS
    ]
    above = {layer.problem(ConvOp.FPROP, Layout.CONTIGUOUS) for layer in _CORE}
    return tuple(layer for layer in layers if layer.problem(ConvOp.FPROP, Layout.CONTIGUOUS) not in above)


ALL: tuple[Layer, ...] = (*_CORE, *_deepbench())
"""In the order in which they are measured."""
