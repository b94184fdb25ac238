"""What is made of cuDNN's statuses, of a missing device, and of its lists with beta 0 and 1."""

import dataclasses

import pytest

from mucudnn.backends.cudnn.constants import Attribute
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.graph import operation_graph
from mucudnn.backends.cudnn.library import CudnnError, Library
from mucudnn.backends.cudnn.offers import Offer, Offers
from mucudnn.errors import BackendError
from mucudnn.problem import ConvOp, ConvProblem
from tests.cudnn.problems import conv

pytestmark = pytest.mark.deviceless

FIRST = 4
"""How many configurations a list gives before the workspace of the next is refused."""


def _offers(library: Library, device: Descriptor, problem: ConvProblem, accumulate: bool = False) -> Offers:
    return Offers(library, device, operation_graph(library, problem, accumulate))


def _refusing_workspaces(library: Library, status: int) -> Library:
    """Return a library that gives the workspace of the first few configurations only."""
    asked = 0

    def get_attribute(descriptor: int, attribute: int, *arguments: int) -> int:
        nonlocal asked
        if attribute == Attribute.CONFIGURATION_WORKSPACE:
            asked += 1
            if asked > FIRST:
                return status
        return library.get_attribute(descriptor, attribute, *arguments)

    return dataclasses.replace(library, get_attribute=get_attribute)


def _deaf_to(library: Library, deaf: Attribute) -> Library:
    """Return a library that does not hear one attribute."""

    def set_attribute(descriptor: int, attribute: int, *arguments: int) -> int:
        return 0 if attribute == deaf else library.set_attribute(descriptor, attribute, *arguments)

    return dataclasses.replace(library, set_attribute=set_attribute)


def test_lists_without_a_device_are_an_error_and_not_an_empty_list(
    library: Library, h200: Descriptor
) -> None:
    without_device = _deaf_to(library, Attribute.HEURISTICS_DEVICE)

    with pytest.raises(
        BackendError, match=r"^cuDNN must know the device for which it lists engines, but got none\.$"
    ):
        _offers(without_device, h200, conv()).listed()


@pytest.mark.parametrize("status", [3000, 3007, 4000])
def test_a_configuration_that_is_not_supported_here_is_skipped(
    library: Library, h200: Descriptor, status: int
) -> None:
    whole = _offers(library, h200, conv()).listed()

    assert _offers(_refusing_workspaces(library, status), h200, conv()).listed() == whole[:FIRST]


@pytest.mark.parametrize("status", [1002, 1008, 2000, 4004, 5003])
def test_a_broken_set_up_or_our_mistake_is_raised(library: Library, h200: Descriptor, status: int) -> None:
    with pytest.raises(CudnnError, match=rf"^Getting attribute configuration workspace .* \({status}\)"):
        _offers(_refusing_workspaces(library, status), h200, conv()).listed()


@pytest.mark.parametrize("status", [2000, 3000, 4000, 5003])
def test_an_engine_that_fails_in_a_scan_is_left_out_in_whatever_way_it_does(
    library: Library, h200: Descriptor, status: int
) -> None:
    whole = _offers(library, h200, conv(dtype="float32")).scanned(())

    found = _offers(_refusing_workspaces(library, status), h200, conv(dtype="float32")).scanned(())

    assert found == whole[:FIRST] != whole


@pytest.mark.parametrize("status", [1002, 4003, 4004])
def test_a_scan_that_lacks_memory_or_a_library_is_an_error(
    library: Library, h200: Descriptor, status: int
) -> None:
    with pytest.raises(CudnnError, match=rf"\({status}\)"):
        _offers(_refusing_workspaces(library, status), h200, conv(dtype="float32")).scanned(())


def test_heuristics_that_do_not_support_a_graph_leave_the_list_empty(
    library: Library, h200: Descriptor
) -> None:
    problem = conv()
    graph = operation_graph(library, problem, accumulate=False)

    assert Offers(dataclasses.replace(library, finalize=lambda _: 3000), h200, graph).listed() == ()


def _pairs(offers: tuple[Offer, ...]) -> list[tuple[object, ...]]:
    return [(offer.engine, offer.knobs, offer.notes, offer.source) for offer in offers]


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_beta_1_lists_the_same_in_the_same_order(
    library: Library, h200: Descriptor, op: ConvOp, dtype: str
) -> None:
    problem = conv(op, dtype=dtype)

    overwriting, accumulating = (
        _offers(library, h200, problem, accumulate).listed() for accumulate in (False, True)
    )

    assert _pairs(overwriting) == _pairs(accumulating)


def test_tensors_that_no_engine_can_address_leave_the_list_empty(library: Library, h200: Descriptor) -> None:
    problem = conv(batch=2**31 - 1, in_channels=2**31, groups=64)

    assert _offers(library, h200, problem).listed() == ()


def test_an_engine_that_needs_the_driver_is_not_offered_without_one(
    library: Library, h200: Descriptor
) -> None:
    compiled_at_run_time = 71

    assert _offers(library, h200, conv()).rebuilt(compiled_at_run_time, ()) is None


def test_an_engine_number_that_does_not_exist_is_not_offered(library: Library, h200: Descriptor) -> None:
    assert _offers(library, h200, conv()).rebuilt(999, ()) is None
