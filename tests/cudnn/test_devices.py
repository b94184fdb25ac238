"""Descriptions of devices: the shipped ones, files, and what is wrong with others."""

import json
from pathlib import Path

import pytest

from mucudnn.backends.cudnn.devices import (
    DEVICES,
    MANDATORY_KEYS,
    DeviceDescription,
    device_described,
    live_device,
)
from mucudnn.backends.cudnn.library import CudnnError, Library
from mucudnn.errors import BackendError, OptionError


def _h200() -> dict[str, object]:
    return json.loads(device_described("h200").text)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("deviceVer", True, "a whole number of at least 0"),
        ("multiProcessorCount", -4, "a whole number of at least 0"),
        ("l2CacheSize", 2**64, "a whole number of at least 0"),
        ("maxGridSize", [1, 2], "three sizes"),
        ("deviceName", 7, "a text"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(key: str, value: object, kind: str) -> None:
    with pytest.raises(BackendError, match=f"^{key} of a device description must be {kind}, but got "):
        DeviceDescription.from_json(_h200() | {key: value})


def test_a_file_that_describes_no_device_is_named(tmp_path: Path) -> None:
    path, folder = tmp_path / "card.json", tmp_path / "folder"
    path.write_bytes(b"\xff\xfe")
    folder.mkdir()

    for unreadable in (path, folder):
        with pytest.raises(BackendError, match=rf"^{unreadable} cannot be read as a device description: "):
            device_described(str(unreadable))


def test_the_shipped_devices_have_their_names_and_sizes() -> None:
    found = [device_described(name) for name in DEVICES]

    assert [(device.name, device.compute_capability, device.multiprocessors) for device in found] == [
        ("NVIDIA H200", 900, 132),
        ("NVIDIA H100 80GB HBM3", 900, 132),
        ("NVIDIA A100-SXM4-80GB", 800, 108),
    ]


def test_a_shipped_device_is_found_in_any_case() -> None:
    assert device_described("H200") == device_described("h200")


def test_a_device_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**_h200(), "deviceName": "Mine", "deviceVer": 860, "extra": 1}))

    device = device_described(str(path))

    assert (device.name, device.compute_capability) == ("Mine", 860)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"must be one of h200, h100, a100 or the path .* but got 'v100'\.$"
    ):
        device_described("v100")


def test_a_text_and_a_mapping_describe_the_same_device() -> None:
    from_mapping = DeviceDescription.from_json(_h200())

    assert json.loads(from_mapping.text) == _h200()
    assert from_mapping.multiprocessors == 132


def test_there_are_23_mandatory_keys_and_the_version_is_none_of_them() -> None:
    assert len(set(MANDATORY_KEYS)) == 23
    assert set(_h200()) - set(MANDATORY_KEYS) == {"version"}


def test_missing_keys_are_named() -> None:
    fields = {key: value for key, value in _h200().items() if key not in ("warpSize", "isTccDriver")}

    with pytest.raises(BackendError, match=r"but got one without warpSize, isTccDriver\.$"):
        DeviceDescription.from_json(fields)


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(BackendError, match=r"^A device description must be (JSON|a JSON object), but got"):
        DeviceDescription.from_json(text)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(
        BackendError, match=r"^deviceVer of a device description must be .* but got '9\.0'\.$"
    ):
        DeviceDescription.from_json({**_h200(), "deviceVer": "9.0"})


@pytest.mark.deviceless
@pytest.mark.parametrize("name", DEVICES)
def test_cudnn_accepts_the_shipped_devices(library: Library, name: str) -> None:
    assert device_described(name).descriptor(library).pointer


@pytest.mark.deviceless
@pytest.mark.parametrize("key", MANDATORY_KEYS)
def test_cudnn_does_not_do_without_a_mandatory_key(library: Library, key: str) -> None:
    fields = {name: value for name, value in _h200().items() if name != key}

    with pytest.raises(CudnnError, match=r"CUDNN_STATUS_BAD_PARAM \(2000\)"):
        DeviceDescription("No name", 900, 132, json.dumps(fields)).descriptor(library)


@pytest.mark.deviceless
def test_a_device_that_is_not_there_is_an_error(library: Library) -> None:
    with pytest.raises(CudnnError, match=r"^Finalising a descriptor of kind device properties must succeed"):
        live_device(library, 99)
