"""Descriptions of devices: with one, cuDNN lists and plans without the device."""

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from mucudnn.backends.cudnn.constants import Attribute, Kind
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.library import Library
from mucudnn.errors import BackendError, OptionError

DEVICES = ("h200", "h100", "a100")
"""Names of the descriptions that are shipped; written from public figures, not read from the devices."""

MANDATORY_KEYS = (
    "deviceName",
    "deviceVer",
    "driverVer",
    "cudaDeviceId",
    "pciDeviceId",
    "multiProcessorCount",
    "warpSize",
    "maxThreadsPerBlock",
    "maxThreadsPerSM",
    "maxCtasPerSM",
    "regsPerBlock",
    "maxRegistersPerSM",
    "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin",
    "reservedSharedMemoryPerBlock",
    "maxBlockSize",
    "maxGridSize",
    "l2CacheSize",
    "totalGlobalMem",
    "smClockRateKHz",
    "memClockRateKHz",
    "isTccDriver",
    "supportCoopLaunch",
)
"""What cuDNN 9.8 to 9.26 will not do without."""


@dataclasses.dataclass(frozen=True)
class DeviceDescription:
    """What cuDNN must know of a device to choose engines for it.

    Attributes:
        name: as its driver calls it.
        compute_capability: a hundred times the major version and ten times the minor one: 900 for 9.0.
        multiprocessors: their number.
        text: the whole description, JSON as cuDNN reads it.
    """

    name: str
    compute_capability: int
    multiprocessors: int
    text: str

    @classmethod
    def from_json(cls, description: str | Mapping[str, object]) -> "DeviceDescription":
        """Return the device that a JSON object describes, given as its text or as a mapping.

        Raises:
            BackendError: no JSON object, a missing key, or a number that is none.
        """
        fields = _object_of(description) if isinstance(description, str) else description
        missing = [key for key in MANDATORY_KEYS if key not in fields]
        if missing:
            raise BackendError(
                f"A device description must have {len(MANDATORY_KEYS)} keys, but got one without "
                f"{', '.join(missing)}."
            )
        for key in MANDATORY_KEYS:
            _check_value(key, fields[key])
        return cls(
            name=str(fields["deviceName"]),
            compute_capability=cast("int", fields["deviceVer"]),
            multiprocessors=cast("int", fields["multiProcessorCount"]),
            text=description if isinstance(description, str) else json.dumps(dict(description)),
        )

    def descriptor(self, library: Library) -> Descriptor:
        """Return the finalised descriptor of the device.

        Raises:
            CudnnError: cuDNN cannot read the description.
        """
        return (
            Descriptor(library, Kind.DEVICE_PROPERTIES).set_text(Attribute.DEVICE_JSON, self.text).finalized()
        )


def device_described(name_or_path: str) -> DeviceDescription:
    """Return a shipped description by its name, in any case, or that of a JSON file by its path.

    Raises:
        OptionError: neither a shipped name nor a file.
        BackendError: the file describes no device.
    """
    if name_or_path.lower() in DEVICES:
        return DeviceDescription.from_json(_shipped(name_or_path.lower()))
    try:
        text = Path(name_or_path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise OptionError(
            f"A device must be one of {', '.join(DEVICES)} or the path of a JSON file, "
            f"but got {name_or_path!r}."
        ) from error
    except (OSError, ValueError) as error:
        raise BackendError(f"{name_or_path} cannot be read as a device description: {error}.") from error
    try:
        return DeviceDescription.from_json(text)
    except BackendError as error:
        raise BackendError(f"{name_or_path} describes no device. {error}") from error


def live_device(library: Library, index: int) -> DeviceDescription:
    """Return the description that cuDNN itself makes of a device of this machine.

    Args:
        library: cuDNN.
        index: the device's number, as CUDA counts.

    Raises:
        CudnnError: there is no such device, or no driver.
    """
    return DeviceDescription.from_json(live_text(library, index))


def live_text(library: Library, index: int) -> str:
    """Return what cuDNN says of a device of this machine, as it comes; for the rest see `live_device`."""
    properties = Descriptor(library, Kind.DEVICE_PROPERTIES).set_int32(Attribute.DEVICE_ID, index).finalized()
    return properties.text(Attribute.DEVICE_JSON)


def _shipped(name: str) -> str:
    folder = importlib.resources.files("mucudnn.backends.cudnn") / "descriptions"
    return (folder / f"{name}.json").read_text(encoding="utf-8")


def _object_of(text: str) -> Mapping[str, object]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BackendError(f"A device description must be JSON, but got {text[:80]!r}.") from error
    if not isinstance(fields, dict):
        raise BackendError(f"A device description must be a JSON object, but got {text[:80]!r}.")
    return fields


def _check_value(key: str, value: object) -> None:
    """Raise unless a key has a value of its kind: a text, three sizes, or a whole number not below 0."""
    if key == "deviceName":
        is_right, kind = isinstance(value, str), "a text"
    elif key in ("maxBlockSize", "maxGridSize"):
        is_right, kind = (
            isinstance(value, list) and len(value) == 3 and all(map(_is_count, value)),
            "three sizes",
        )
    else:
        is_right, kind = _is_count(value), "a whole number of at least 0"
    if not is_right:
        raise BackendError(f"{key} of a device description must be {kind}, but got {value!r}.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
