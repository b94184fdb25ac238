"""The real cuDNN, once for all tests, and what it lists for a described H200."""

import pytest

from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.devices import device_described
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.backends.cudnn.library import Library, load_library


@pytest.fixture(scope="session")
def library() -> Library:
    return load_library()


@pytest.fixture(scope="session")
def enumerator(library: Library) -> Enumerator:
    return Enumerator(library, device_described("h200"))


@pytest.fixture(scope="session")
def h200(library: Library) -> Descriptor:
    return device_described("h200").descriptor(library)
