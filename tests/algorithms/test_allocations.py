"""Allocations are seen on whichever thread they are made."""

import pytest
import torch

from mucudnn.algorithms.workers import run_on_workers
from tests.algorithms.allocations import ALLOCATION_BOUND, allocated_bytes, allocated_bytes_of_worker

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_allocation_that_is_given_back_at_once_is_seen() -> None:
    image = torch.ones(1000)

    assert allocated_bytes(lambda: (image + image).sum()) >= image.nbytes


@pytest.mark.parametrize("worker", [0, 1])
def test_an_allocation_by_a_worker_is_seen(worker: int) -> None:
    images = [torch.ones(1000), torch.ones(3000)]

    def call() -> None:
        run_on_workers([lambda image=image: (image + image).sum().item() for image in images])

    taken = allocated_bytes_of_worker(worker, call)

    assert images[worker].nbytes <= taken <= images[worker].nbytes + ALLOCATION_BOUND
