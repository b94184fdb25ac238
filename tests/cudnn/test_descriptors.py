"""A descriptor lives as long as its owner and whatever refers to it, and says which call cuDNN refused."""

import pytest

from mucudnn.backends.cudnn.constants import Attribute, Kind
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.devices import device_described
from mucudnn.backends.cudnn.library import CudnnError, Library
from tests.cudnn.doubles import Calls, library_double


def test_a_descriptor_is_destroyed_with_its_owner() -> None:
    calls = Calls()
    descriptor = Descriptor(library_double(calls), Kind.TENSOR)
    assert calls == Calls(created=1)

    del descriptor

    assert calls == Calls(created=1, destroyed=[1])


def test_a_descriptor_is_left_alone_while_the_process_ends() -> None:
    calls = Calls()

    Descriptor(library_double(calls), Kind.TENSOR).__del__(lambda: True)

    assert calls.destroyed == [1]  # as its owner goes, and not before


def test_a_child_lives_as_long_as_the_descriptor_that_refers_to_it() -> None:
    calls = Calls()
    library = library_double(calls)
    child, parent = Descriptor(library, Kind.TENSOR), Descriptor(library, Kind.FORWARD)
    parent.set_descriptors(Attribute.FORWARD_X, child)

    del child
    assert calls.destroyed == []

    del parent
    assert sorted(calls.destroyed) == [1, 2]


def test_a_plan_is_destroyed_when_the_next_one_is_made() -> None:
    calls = Calls()
    library = library_double(calls)
    configuration, plan = (
        Descriptor(library, Kind.ENGINE_CONFIGURATION),
        Descriptor(library, Kind.EXECUTION_PLAN),
    )
    plan.set_descriptors(Attribute.PLAN_CONFIGURATION, configuration)

    del configuration, plan  # as Python's garbage collector may do while a graph is captured
    assert calls.destroyed == []

    Descriptor(library, Kind.ENGINE_CONFIGURATION)
    assert calls.destroyed == [3]

    kept = Descriptor(library, Kind.EXECUTION_PLAN)
    assert calls.destroyed == [3, 2, 1]
    assert kept.pointer == 4


def test_a_descriptor_that_was_not_created_is_not_destroyed() -> None:
    calls = Calls()

    with pytest.raises(CudnnError, match="Creating a descriptor of kind tensor must succeed"):
        Descriptor(library_double(calls, create_descriptor=lambda *_: 4000), Kind.TENSOR)
    assert calls.destroyed == []


def test_a_refused_call_names_kind_or_attribute() -> None:
    def refuse(*arguments: object) -> int:
        return 2000

    library = library_double(finalize=refuse, set_attribute=refuse, get_attribute=refuse)
    descriptor = Descriptor(library, Kind.ENGINE)

    with pytest.raises(CudnnError, match=r"^Finalising a descriptor of kind engine must succeed"):
        descriptor.finalized()
    with pytest.raises(CudnnError, match=r"^Setting attribute engine number \(1301\) must succeed"):
        descriptor.set_ints(Attribute.ENGINE_NUMBER, 1)
    with pytest.raises(CudnnError, match=r"^Getting attribute engine number \(1301\) must succeed"):
        descriptor.int_value(Attribute.ENGINE_NUMBER)


@pytest.mark.deviceless
def test_cudnn_says_why_a_descriptor_cannot_be_finalised(library: Library) -> None:
    with pytest.raises(CudnnError, match=r"CUDNN_STATUS_BAD_PARAM \(2000\): .+\.$"):
        Descriptor(library, Kind.HEURISTICS).finalized()


@pytest.mark.deviceless
def test_a_text_comes_back_as_it_was_set(library: Library) -> None:
    description = device_described("h200")

    text = description.descriptor(library).text(Attribute.DEVICE_JSON)

    assert type(description).from_json(text).name == "NVIDIA H200"
