"""A card that is not there."""

from mucudnn.backends.cudnn.card import TorchCard


class Absent(TorchCard):
    """A card that is not there, and captures nothing."""

    is_capturing = False

    def __init__(self, index: int = 0) -> None:
        self._index = index
