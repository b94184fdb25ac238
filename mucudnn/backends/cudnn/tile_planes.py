"""Planes of tiles on a card, and the kernels of convolutions that are made of them.

A micro-batch is gathered to planes, multiplied plane by plane and scattered back (`tile_source`), at once or
some tile rows of its images at a time; the filter is gathered once per mini-batch. Contiguous images have
planes of (channels, tiles), others of (tiles, channels), so that all launches read and write neighbours. What
is not finite spreads over a tile, as in cuDNN's own Winograd.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mucudnn.algorithms import GradientSum
from mucudnn.algorithms.base import Region, carve
from mucudnn.algorithms.forms import Matrix
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.backends.cudnn.card import Card, check_not_capturing
from mucudnn.backends.cudnn.compiler import KernelLaunch
from mucudnn.backends.cudnn.tile_source import INT_LIMIT, MIX, THREADS, Kind, Transform
from mucudnn.problem import ConvOp, ConvProblem, Layout


class Launches(NamedTuple):
    """What launches a transform.

    Attributes:
        threads: of the kernel that meets the image.
        of_image: launches that one.
        length: elements of a line of all tiles and channels.
        mix: launches the kernel that goes along h; None if there is but one kernel.
    """

    threads: int
    of_image: KernelLaunch
    length: int
    mix: KernelLaunch | None


class Launcher:
    """Launches transforms on one card.

    Args:
        card: that compiles and runs the kernels.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._launches: dict[tuple[str, str], KernelLaunch] = {}

    def stream(self) -> int:
        """Return the address of the stream on which the calling thread puts its work now."""
        return self._card.stream()

    def may_multiply(self, problem: ConvProblem) -> bool:
        """Return whether the user's flags, which may have changed since, still let planes be multiplied."""
        return self._card.obstacle_to_products(problem.dtype) is None

    def launches(self, transform: Transform, plane: int) -> Launches:
        """Return what launches a transform for planes of so many elements; each kernel is compiled once.

        Raises:
            BackendError: one would have to be compiled while the stream is being captured.
        """
        threads, length = transform.lines * plane, transform.line_values * plane
        of_image = self._launch(transform.kind.value, transform.source(is_long=threads > INT_LIMIT))
        mix = None
        if transform.is_split:
            mix = self._launch(MIX, transform.mix_source(is_long=length > INT_LIMIT))
        return Launches(threads, of_image, length, mix)

    def _launch(self, kernel: str, source: str) -> KernelLaunch:
        key = kernel, source
        found = self._launches.get(key)
        if found is None:
            check_not_capturing(self._card, "Compiling a kernel")
            with self._card.current():
                found = self._launches[key] = self._card.compiled(source, kernel)
        return found


def _tile_count(geometry: TileGeometry) -> int:
    """Tiles of a block: of some tile rows of every image."""
    return geometry.batch * geometry.rows * geometry.tiles[1]


def regions_of(geometry: TileGeometry, groups: int = 1) -> tuple[Region, ...]:
    """The workspace: planes, and lines on their way to planes or from them, if there are any.

    "filter", or the sums of a gradient's planes, outlives a part and lies first.

    Args:
        geometry: of a micro-batch.
        groups: of tiles, whose products are summed apart.
    """
    x, y, planes = geometry.x_channels, geometry.y_channels, geometry.planes
    sizes = {"filter": x * y, "x": x * _tile_count(geometry), "y": y * _tile_count(geometry)}
    forms, dtype = _Forms(geometry), geometry.problem.dtype
    lines = max(sizes[name] * transform.middle_values for name, transform in forms.by_region.items())
    counts = {"filter": planes * groups, "x": planes, "y": planes}
    regions = [Region(name, (counts[name], size), dtype) for name, size in sizes.items()]
    return (*regions, Region("lines", (lines,), dtype))


class _Planes:
    """Planes in a workspace, and the launches between them and images of one kind.

    Args:
        launcher: what puts kernels on a stream.
        memory: (planes, elements).
        lines: memory for what lies between the two kernels of a transform, if there is any such.
        channels: of the images.
        tiles: of an image, or of a block of its rows (h, w).
        has_channels_last: whether channels are innermost in a plane.
        padding: of images that are gathered.
        groups: of tiles, one behind the other in a plane.
    """

    def __init__(
        self,
        launcher: Launcher,
        memory: Tensor,
        lines: Tensor,
        channels: int,
        tiles: tuple[int, int],
        has_channels_last: bool,
        padding: tuple[int, int] = (0, 0),
        groups: int = 1,
    ) -> None:
        self.memory = memory
        self._launcher = launcher
        self._lines = lines
        self._channels = channels
        self._tiles = tiles
        self._padding = padding
        self._has_channels_last = has_channels_last
        self._plane = memory.size(1)
        self._group_tiles = self._plane // channels // groups
        self._seen: tuple[int, ...] = ()
        self._numbers: tuple[int, ...] = ()

    @property
    def matrices(self) -> Tensor:
        """(planes · groups, channels, tiles of a group), whichever of the last two is innermost."""
        if self._has_channels_last:
            return self.memory.view(-1, self._group_tiles, self._channels).transpose(1, 2)
        return self.memory.view(-1, self._channels, self._group_tiles)

    def launches(self, transform: Transform) -> Launches:
        """Return what launches `transform` on planes of this size."""
        return self._launcher.launches(transform, self._plane)

    def gather(self, launches: Launches, image: Tensor, top: int = 0) -> None:
        """Fill the planes from `image`, (n, c, h, w), for tiles from the row `top` of y on."""
        target = self.memory if launches.mix is None else self._lines
        addresses = image.data_ptr(), target.data_ptr()
        self._put(launches.of_image, launches.threads, *addresses, *self._sizes(image, top))
        if launches.mix is not None:
            self._mix(launches.mix, launches.length, self._lines, self.memory)

    def scatter(
        self,
        launches: Launches,
        image: Tensor,
        bias: Tensor | None = None,
        *,
        top: int = 0,
        adds: bool = False,
        addends: int = 1,
    ) -> None:
        """Write the planes to `image`, or add them to it, and the bias of every channel.

        Args:
            launches: of the transform; of one kernel if there are several addends.
            image: (n, c, h, w).
            bias: (c,).
            top: row of `image` in which the first tile lies.
            adds: whether to add to what `image` holds.
            addends: planes, one behind the other, that are added up before they are transformed.
        """
        source = self.memory
        if launches.mix is not None:
            source = self._lines
            self._mix(launches.mix, launches.length, self.memory, source)
        start, step = (0, 0) if bias is None else (bias.data_ptr(), bias.stride(0))
        first = source.data_ptr(), start, image.data_ptr(), step, int(adds), addends
        self._put(launches.of_image, launches.threads, *first, *self._sizes(image, top))

    def _mix(self, mix: KernelLaunch, length: int, source: Tensor, target: Tensor) -> None:
        self._put(mix, length, source.data_ptr(), target.data_ptr(), length)

    def _put(self, launch: KernelLaunch, threads: int, *arguments: int) -> None:
        launch(self._launcher.stream(), -(-threads // THREADS), THREADS, arguments)

    def _sizes(self, image: Tensor, top: int) -> tuple[int, ...]:
        """Return what a kernel must know of images like `image`, which are all alike as a rule."""
        seen = (*image.shape[2:], *image.stride())
        if seen != self._seen:
            shape = self._plane, self._group_tiles, self._channels, int(self._has_channels_last)
            self._numbers, self._seen = (*shape, *self._tiles, *seen), seen
        return (*self._numbers, self._padding[0] - top, self._padding[1])


class _Forms:
    """The transforms of one problem, between images and planes."""

    def __init__(self, geometry: TileGeometry) -> None:
        self._forms = geometry.forms
        self._dtype = geometry.problem.dtype
        self._taps = (geometry.taps[1], geometry.taps[2])
        self._op = geometry.problem.op

    @property
    def x(self) -> Transform:
        """B: from x, or what stands for it, to planes."""
        h, w = (form.input_transform for form in self._forms)
        return self._transform(Kind.GATHER, h, w, self._outputs)

    @property
    def y(self) -> Transform:
        """A: from products to y, or what stands for it; transposed, from dy to planes."""
        h, w = (form.output_transform for form in self._forms)
        if self._op is ConvOp.WGRAD:
            return self._transform(Kind.GATHER, h.T, w.T, self._outputs)
        return self._transform(Kind.SCATTER, h, w, self._outputs)

    @property
    def filter(self) -> Transform:
        """G: from the filter to planes; transposed, from a sum of planes to its gradient.

        In dgrad the filter is turned round.
        """
        h, w = (form.filter_transform for form in self._forms)
        if self._op is ConvOp.WGRAD:
            return self._transform(Kind.SCATTER, h.T, w.T, self._taps)
        if self._op is ConvOp.DGRAD:
            h, w = h[:, ::-1], w[:, ::-1]
        return self._transform(Kind.GATHER, h, w, self._taps)

    @property
    def by_region(self) -> Mapping[str, Transform]:
        """The three by the regions of the workspace in which their planes lie."""
        return {"filter": self.filter, "x": self.x, "y": self.y}

    @property
    def _outputs(self) -> tuple[int, int]:
        h, w = self._forms
        return h.outputs, w.outputs

    def _transform(self, kind: Kind, left: Matrix, right: Matrix, outputs: tuple[int, int]) -> Transform:
        return Transform(kind, left, right, outputs, self._dtype)


def _planes(
    geometry: TileGeometry, launcher: Launcher, buffer: Tensor, groups: int = 1
) -> tuple[_Planes, ...]:
    """Return the planes of the filter, of x and of y; the filter's are (k, c)."""
    space = carve(buffer, regions_of(geometry, groups))
    has_channels_last = geometry.problem.layout is Layout.CHANNELS_LAST
    tiles = (geometry.rows, geometry.tiles[1])
    padding = (geometry.padding[1], geometry.padding[2])
    lines = space["lines"]
    return (
        _Planes(
            launcher, space["filter"], lines, geometry.problem.in_channels, (1, 1), has_channels_last=True
        ),
        _Planes(launcher, space["x"], lines, geometry.x_channels, tiles, has_channels_last, padding, groups),
        _Planes(launcher, space["y"], lines, geometry.y_channels, tiles, has_channels_last, groups=groups),
    )


def _tops(geometry: TileGeometry) -> range:
    """Return the rows of y in which the blocks begin."""
    outputs = geometry.forms[0].outputs
    return range(0, geometry.tiles[0] * outputs, geometry.rows * outputs)


def get_ready(geometry: TileGeometry, launcher: Launcher, groups: int = 1) -> None:
    """Compile what kernels of a micro-batch launch, on whatever memory.

    Raises:
        BackendError: it cannot be compiled.
    """
    planes = {region.name: region.shape[-1] for region in regions_of(geometry, groups)}
    for name, transform in _Forms(geometry).by_region.items():
        launcher.launches(transform, planes[name])


class CardSliceKernel:
    """fprop or dgrad of one micro-batch."""

    def __init__(self, geometry: TileGeometry, launcher: Launcher, buffer: Tensor) -> None:
        forms = _Forms(geometry)
        self._launcher = launcher
        self._problem = geometry.problem
        self._filter, self._x, self._y = _planes(geometry, launcher, buffer)
        self._to_filter = self._filter.launches(forms.filter)
        self._to_x = self._x.launches(forms.x)
        self._to_outputs = self._y.launches(forms.y)
        self._tops = _tops(geometry)
        # (y's channels, x's channels); the planes themselves are (k, c), seen as c channels of k tiles.
        u = self._filter.matrices
        u = u if geometry.problem.op is ConvOp.DGRAD else u.transpose(1, 2)
        x, y = self._x.matrices, self._y.matrices
        if geometry.problem.layout is Layout.CHANNELS_LAST:
            self._factors, self._products = (x.transpose(1, 2), u.transpose(1, 2)), y.transpose(1, 2)
        else:
            self._factors, self._products = (u, x), y

    def prepare(self, weight: Tensor) -> None:
        """Transform the filter; once per mini-batch."""
        self._filter.gather(self._to_filter, _flat(weight))

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:  # noqa: ARG002  # it is transformed
        """Write the part's result into `out`, if the user's flags still permit it; return whether they do.

        What is written is taken for sound, as engines' results are.
        """
        if not self._launcher.may_multiply(self._problem):
            return False
        image, out = _flat(image), _flat(out)
        for top in self._tops:
            self._x.gather(self._to_x, image, top)
            torch.bmm(*self._factors, out=self._products)
            self._y.scatter(self._to_outputs, out, bias, top=top)
        return True


class CardSumKernel:
    """wgrad of one micro-batch, summed in the transformed domain.

    Args:
        geometry: of the micro-batch.
        launcher: what puts kernels on a stream.
        buffer: memory for `regions_of` both.
        groups: of tiles, as many in each, whose products are summed apart: a product of few channels and
            many tiles keeps more of the card busy when it is cut along its sum.
    """

    def __init__(self, geometry: TileGeometry, launcher: Launcher, buffer: Tensor, groups: int) -> None:
        forms = _Forms(geometry)
        self._launcher = launcher
        self._problem = geometry.problem
        self._groups = groups
        if groups > 1 and forms.filter.is_split:
            raise ValueError(
                f"There must be one sum of planes that axes go through one by one, not {groups}."
            )
        self._filter, self._x, self._y = _planes(geometry, launcher, buffer, groups)
        self._to_x = self._x.launches(forms.x)
        self._to_y = self._y.launches(forms.y)
        self._to_taps = self._filter.launches(forms.filter)
        self._tops = _tops(geometry)
        self._factors = self._y.matrices, self._x.matrices.transpose(1, 2)
        self._sum = self._filter.matrices.transpose(1, 2)

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's products to the running sum, or start the sum with them if it is the `first`."""
        if not self._launcher.may_multiply(self._problem):
            return  # nor will it be permitted at the end
        image, gradient = _flat(image), _flat(gradient)
        for top in self._tops:
            self._x.gather(self._to_x, image, top)
            self._y.gather(self._to_y, gradient, top)
            if first and top == 0:
                torch.bmm(*self._factors, out=self._sum)
            else:
                self._sum.baddbmm_(*self._factors)

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether the user's flags have permitted it."""
        if not self._launcher.may_multiply(self._problem):
            return False
        total = _flat(into.total)
        self._filter.scatter(self._to_taps, total, adds=into.accumulate, addends=self._groups)
        return True


def _flat(tensor: Tensor) -> Tensor:
    """View images and filters of one dimension as those of two."""
    return tensor if tensor.dim() == 4 else tensor.unsqueeze(2)
