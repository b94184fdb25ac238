"""What tests of threads have in common: programs that run in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.algorithms.alone import SERVER, Server


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What runs programs in processes whose environment says nothing of OpenMP."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=inherited,
    ) as process:
        yield Server(process, tmp_path_factory.mktemp("alone"))
