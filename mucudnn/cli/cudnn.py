"""cuDNN and its devices in the words of the command line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mucudnn.backends.cudnn.devices import DeviceDescription
    from mucudnn.backends.cudnn.library import Library


def version_of(library: "Library") -> str:
    """Return 9.19.0 for 91900."""
    return f"{library.version // 10000}.{library.version // 100 % 100}.{library.version % 100}"


def described_device(device: "DeviceDescription") -> str:
    """Return "NVIDIA H200, compute capability 9.0, 132 multiprocessors"."""
    major, minor = divmod(device.compute_capability, 100)
    return (
        f"{device.name}, compute capability {major}.{minor // 10}, {device.multiprocessors} multiprocessors"
    )
