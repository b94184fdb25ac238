"""What cuDNN does with operands that are not aligned as its plan was promised.

It runs in a process of its own, since a fault in the card's memory makes every later call fail.
"""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from bench.gpu.ground import CardGround, Ground
from bench.gpu.layers import MIDDLING
from mucudnn.algorithms.own import operands, own_convolution
from mucudnn.backends.cudnn.launch import Launch, Packs
from mucudnn.live.reference import relative_error
from mucudnn.problem import ConvOp, ConvProblem, Layout

_BATCH = 16

ARGUMENTS: Mapping[str, ConvProblem] = {
    f"{dtype}-{layout}": MIDDLING.problem(ConvOp.FPROP, dtype, layout).with_batch(_BATCH)
    for dtype, layout in (
        ("bfloat16", Layout.CHANNELS_LAST),
        ("bfloat16", Layout.CONTIGUOUS),
        ("float32", Layout.CHANNELS_LAST),
    )
}
"""What is tried, by the argument of the process."""


def outcome(ground: Ground, problem: ConvProblem) -> str:
    """Return whether the first plan of an fprop is "fine", "wrong" or an "error" one element off.

    The image starts one element behind a multiple of 16 bytes, though the plan was promised a multiple.
    """
    generator = torch.Generator(ground.card.device).manual_seed(0)
    image, weight, _ = operands(problem, generator, ground.card.device)
    shifted = one_element_off(image)
    out = torch.full_like(own_convolution(problem, image, weight), float("nan"))
    try:
        _launch(ground, problem, shifted, weight, out)
        error = relative_error(out, _reference(problem, image, weight))
    except Exception as failure:  # noqa: BLE001  # whatever it is, it is the answer
        return "error: " + (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    bound = ground.backend.error_bound(problem, "")
    return "fine" if error <= bound else f"wrong: error {error:.1e}"


def one_element_off(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides that starts one element behind a multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def _launch(ground: Ground, problem: ConvProblem, image: Tensor, weight: Tensor, out: Tensor) -> None:
    enumerator = ground.enumerator()
    first = enumerator.listed(problem)[0]
    plan = enumerator.plan(problem, first.engine, first.knobs, accumulate=False)
    launch = Launch(ground.library, plan, 1, Packs(ground.library))  # our own check would refuse it
    workspace = torch.empty(first.workspace_bytes, dtype=torch.uint8, device=ground.card.device)
    launch(ground.handle(), image.data_ptr(), weight.data_ptr(), out.data_ptr(), workspace.data_ptr())
    ground.card.clock()


def _reference(problem: ConvProblem, image: Tensor, weight: Tensor) -> Tensor:
    return own_convolution(problem, image.double(), weight.double())


def main() -> int:
    """Print how it came out for the argument, on the card whose number is the second one."""
    argument, index = sys.argv[1:]
    ground = CardGround(int(index))
    with ground.current():
        print(outcome(ground, ARGUMENTS[argument]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
