"""The processor as if it were another device."""

from torch import Tensor

from mucudnn.backends.cpu.backend import CpuBackend


class Device(CpuBackend):
    """The processor, as if its memory came in one piece, like a card's; it notes what it is given back."""

    takes_memory_by_pages = False

    def __init__(self) -> None:
        super().__init__()
        self.released: list[int] = []

    def release(self, tail: Tensor) -> None:
        self.released.append(tail.numel())
        tail.untyped_storage().resize_(0)
