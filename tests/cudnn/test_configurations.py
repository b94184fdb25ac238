"""Ids of engines, and what the rules permit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.backends.cudnn.configurations import EngineConfiguration, Rules, Source, id_of, is_id, parse_id
from mucudnn.errors import BackendError


def test_an_id_names_the_engine_and_its_knobs_in_cudnns_order() -> None:
    configuration = EngineConfiguration(65, ((13, 1), (2, 5), (18, -1)), (), 0, None, Source.A, 0)

    assert configuration.id == "cudnn:eng65_k13=1_k2=5_k18=-1"


def test_an_engine_without_knobs_has_a_short_id() -> None:
    assert id_of(2, ()) == "cudnn:eng2"


@given(
    st.integers(0, 99), st.lists(st.tuples(st.integers(0, 43), st.integers(-1, 99)), max_size=9).map(tuple)
)
def test_an_id_is_read_back(engine: int, knobs: tuple[tuple[int, int], ...]) -> None:
    assert is_id(id_of(engine, knobs))
    assert parse_id(id_of(engine, knobs)) == (engine, knobs)


@pytest.mark.parametrize(
    "text",
    ["", "cudnn:aten", "cpu:eng1", "cudnn:eng", "cudnn:eng1_k2", "cudnn:eng1 ", "cudnn:eng٣", "eng1_k2=3"],
)
def test_what_is_no_id_of_an_engine_is_refused(text: str) -> None:
    assert not is_id(text)
    with pytest.raises(
        BackendError, match=r"^An engine's id must look like 'cudnn:eng65_k2=5_k13=1', but got"
    ):
        parse_id(text)


def test_inputs_are_never_rounded_to_a_smaller_type() -> None:
    assert not Rules().permits(("DOWN_CONVERT_INPUTS",), "float32")


def test_without_tf32_float32_keeps_off_the_tensor_cores() -> None:
    rules = Rules(allow_tf32=False)

    assert not rules.permits(("TENSOR_CORE",), "float32")
    assert rules.permits(("TENSOR_CORE",), "float16")
    assert rules.permits(("FFT",), "float32")


def test_determinism_drops_what_is_not_deterministic() -> None:
    assert not Rules(deterministic=True).permits(("TENSOR_CORE", "NONDETERMINISTIC"), "float16")
    assert Rules().permits(("TENSOR_CORE", "NONDETERMINISTIC"), "float16")
