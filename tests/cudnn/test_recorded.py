"""What an H200 declared when it was recorded, beside what cuDNN says by its description."""

from collections.abc import Iterator

import pytest
import torch

from bench.workloads import NETWORKS
from mucudnn.backends.cudnn.configurations import Rules, is_id, parse_id
from mucudnn.backends.cudnn.devices import device_described
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.backends.cudnn.library import Library
from mucudnn.choices import Policy
from mucudnn.examining.extraction import extract
from mucudnn.profile import Record
from mucudnn.recordings import recording_file
from mucudnn.store import readable_store

KNOWN_BY_DRIVER = {
    *(("fprop", engine) for engine in (3, 4, 6)),
    *(("dgrad", engine) for engine in (4, 5, 7, 50)),
    *(("wgrad", engine) for engine in (17, 18)),
}
"""Engines that cuDNN offers only where there is a driver."""


def recorded(network: str) -> Iterator[Record]:
    """All that is known of the engines of cuDNN in the parts of a network's convolutions."""
    (workload,) = (each for each in NETWORKS if each.name == network)
    found = extract(workload.build(), torch.zeros(workload.shape)).problems.values()
    parts = {problem.part(size) for problem in found for size in Policy.POWER_OF_TWO.sizes(problem.batch)}
    with readable_store(recording_file("h200")) as store:
        (environment,) = store.environments()
        for part in parts:
            yield from (
                record
                for record in store.records_of(environment, part)
                if is_id(record.trial.algorithm) and record.workspace_bytes is not None
            )


@pytest.mark.lists
@pytest.mark.deviceless
@pytest.mark.parametrize(("network", "least"), [("resnet18", 1700), ("alexnet", 850), ("unet3d", 350)])
def test_a_card_declares_the_workspaces_of_its_description_in_strict_float32(
    library: Library, network: str, least: int
) -> None:
    described = Enumerator(library, device_described("h200"), Rules(allow_tf32=False))
    declared: dict[str, int] = {}
    expected: dict[str, int] = {}
    for record in recorded(network):
        problem, algorithm = record.trial.problem, record.trial.algorithm
        engine, knobs = parse_id(algorithm)
        found = described.configuration(problem, engine, knobs)
        assert found is not None or (problem.op, engine) in KNOWN_BY_DRIVER
        if found is not None and record.workspace_bytes is not None:
            extra = 0 if record.trial.whole else problem.running_sum_bytes
            key = f"{problem} {algorithm} {record.trial.whole}"
            declared[key], expected[key] = record.workspace_bytes - extra, found.workspace_bytes

    assert len(declared) >= least
    assert declared == expected
