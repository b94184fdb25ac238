"""Parts of a division on cuDNN: addresses of samples, worked out and handed to a launch."""

import dataclasses
import math
from collections.abc import Callable

from torch import Tensor

from mucudnn.algorithms import GradientSum
from mucudnn.backends.cudnn.launch import Launch
from mucudnn.errors import BackendError
from mucudnn.problem import ConvOp, ConvProblem


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a kernel works.

    Attributes:
        handle: gives the calling thread's handle, on its present stream.
        buffer: the workspace, bytes; its address may change from one launch to the next.
        needed_bytes: what the plan declares.

    Raises:
        BackendError: the buffer is too small.
    """

    handle: Callable[[], int | None]
    buffer: Tensor
    needed_bytes: int

    def __post_init__(self) -> None:
        if self.buffer.numel() < self.needed_bytes:
            raise BackendError(
                f"The workspace must have at least {self.needed_bytes} bytes, but got {self.buffer.numel()}."
            )

    @property
    def workspace(self) -> int:
        """Address of the workspace; 0 where none is needed."""
        return self.buffer.data_ptr() if self.needed_bytes else 0


class EngineKernel:
    """fprop or dgrad of a micro-batch; the result overwrites its samples (beta 0)."""

    def __init__(self, problem: ConvProblem, launch: Launch, place: Place) -> None:
        self._launch = launch
        self._place = place
        self._is_fprop = problem.op is ConvOp.FPROP
        self._x_bytes = _sample_bytes(problem.input_shape, problem)
        self._y_bytes = _sample_bytes(problem.output_shape, problem)
        self._bias_shape = (1, problem.out_channels, *(1 for _ in problem.output_size))

    def prepare(self, weight: Tensor) -> None:
        """Nothing is paid once per mini-batch: the engines read the filter as it is."""

    def run(
        self,
        image: Tensor,
        weight: Tensor,
        out: Tensor,
        bias: Tensor | None,  # noqa: ARG002  # added in the end
        here: slice,
    ) -> bool:
        """Write the result of the samples `here` of `image` to those of `out`, without the bias.

        It is taken for sound: engines that transform tiles spread what is not finite over a tile, here as
        wherever PyTorch runs them.
        """
        x, y = (image, out) if self._is_fprop else (out, image)
        self._launch(
            self._place.handle(),
            x.data_ptr() + here.start * self._x_bytes,
            weight.data_ptr(),
            y.data_ptr() + here.start * self._y_bytes,
            self._place.workspace,
        )
        return True

    def finish(self, out: Tensor, bias: Tensor | None, here: slice) -> None:
        """Add the bias to the samples `here`, in one go for all parts."""
        if bias is not None:
            out[here].add_(bias.view(self._bias_shape))


class EngineSumKernel:
    """wgrad of a micro-batch, added up in the gradient itself (beta 1), or in 32 bits beside it.

    Args:
        problem: of the micro-batch.
        overwriting: the plan with beta 0.
        accumulating: the plan with beta 1; None for 16-bit gradients, which would be rounded at every part.
        place: where both work.
    """

    def __init__(
        self, problem: ConvProblem, overwriting: Launch, accumulating: Launch | None, place: Place
    ) -> None:
        self._overwriting = overwriting
        self._accumulating = accumulating
        self._place = place
        self._x_bytes = _sample_bytes(problem.input_shape, problem)
        self._y_bytes = _sample_bytes(problem.output_shape, problem)

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool, here: slice) -> None:
        """Add the dw of the samples `here` to the running sum, or start it if they are the `first`."""
        starts = first and not into.accumulate
        if into.scratch is not None:
            self._run(self._overwriting, image, gradient, into.scratch, here)
            if starts:
                into.total.copy_(into.scratch)
            else:
                into.total.add_(into.scratch)
        elif starts:
            self._run(self._overwriting, image, gradient, into.total, here)
        elif self._accumulating is not None:
            self._run(self._accumulating, image, gradient, into.total, here)
        else:
            raise BackendError("A 16-bit gradient of several parts must be summed in 32 bits, but is not.")

    def finish(self, into: GradientSum) -> bool:  # noqa: ARG002  # the sum is there already
        """The sum is where it belongs, and sound."""
        return True

    def _run(self, launch: Launch, image: Tensor, gradient: Tensor, dw: Tensor, here: slice) -> None:
        launch(
            self._place.handle(),
            image.data_ptr() + here.start * self._x_bytes,
            dw.data_ptr(),
            gradient.data_ptr() + here.start * self._y_bytes,
            self._place.workspace,
        )


def _sample_bytes(shape: tuple[int, ...], problem: ConvProblem) -> int:
    return math.prod(shape[1:]) * problem.itemsize
