"""Which inputs the outputs of a convolution read along one axis, and by which taps."""

import dataclasses
from typing import NamedTuple

from mucudnn.algorithms.sides import three
from mucudnn.problem import ConvOp, ConvProblem


class Tap(NamedTuple):
    """One tap of a filter as outputs of one phase see it.

    Attributes:
        tap: its place in the filter.
        shift: from the input of an output's own number within its phase, times the axis's step, to what it
            reads.
    """

    tap: int
    shift: int


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis: output `phase + i * period` reads the inputs `i * step + shift` by the taps of its phase.

    Forward the outputs are one phase, and the step is the stride. In the gradient of the input, where outputs
    are its pixels and inputs those of dy, those that are a stride apart are a phase with taps of its own.

    Attributes:
        outputs: pixels.
        step: inputs from one output of a phase to the next.
        phases: the taps of each; `period` is how many there are.
    """

    outputs: int
    step: int
    phases: tuple[tuple[Tap, ...], ...]

    @property
    def period(self) -> int:
        """Outputs from one of a phase to the next."""
        return len(self.phases)

    @property
    def first(self) -> int:
        """The least shift of all."""
        return min(tap.shift for phase in self.phases for tap in phase)

    @property
    def most_taps(self) -> int:
        """Of a phase."""
        return max(map(len, self.phases))

    def reach(self, outputs: int) -> int:
        """Return how many inputs so many outputs read, from one that begins a period on."""
        last = max(tap.shift for phase in self.phases for tap in phase)
        return (outputs - 1) // self.period * self.step + last - self.first + 1


def axes_of(problem: ConvProblem) -> tuple[Axis, ...]:
    """Return the axes d, h and w of what is written by fprop and dgrad, or of dy for wgrad."""
    is_dgrad = problem.op is ConvOp.DGRAD
    size = problem.input_size if is_dgrad else problem.output_size
    filters = (problem.kernel_size, problem.stride, problem.dilation)
    axes = zip(*(three(each, 1) for each in (size, *filters)), three(problem.padding, 0), strict=True)
    return tuple((_backward if is_dgrad else _forward)(*each) for each in axes)


def _forward(outputs: int, taps: int, stride: int, dilation: int, padding: int) -> Axis:
    phase = tuple(Tap(tap, tap * dilation - padding) for tap in range(taps))
    return Axis(outputs, stride, (phase,))


def _backward(outputs: int, taps: int, stride: int, dilation: int, padding: int) -> Axis:
    """Pixel p of dx gets, by tap t, from pixel (p + padding - t * dilation) / stride of dy, if it is one."""
    ways = [(tap, padding - tap * dilation) for tap in range(taps)]
    phases = (
        tuple(Tap(tap, (phase + way) // stride) for tap, way in ways if (phase + way) % stride == 0)
        for phase in range(stride)
    )
    return Axis(outputs, 1, tuple(phases))
