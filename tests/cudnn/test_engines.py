"""What cuDNN 9.19 lists for a described H200, and what becomes of layouts, types, alignment and flags."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.gpu.layers import LAYERS
from mucudnn.backends.cudnn import offers
from mucudnn.backends.cudnn.configurations import EngineConfiguration, Rules, Source
from mucudnn.backends.cudnn.constants import Attribute
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.devices import DEVICES, device_described
from mucudnn.backends.cudnn.engines import Enumerator, accumulates_by_beta
from mucudnn.backends.cudnn.library import CudnnError, Library
from mucudnn.choices import Search
from mucudnn.errors import BackendError
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.cudnn.problems import conv, conv_in, problems_of

pytestmark = pytest.mark.deviceless

CONTIGUOUS = {"layout": Layout.CONTIGUOUS, "filter_layout": Layout.CONTIGUOUS}
FPROP, DGRAD, WGRAD = ConvOp


def _counts(enumerator: Enumerator, **changes: object) -> list[int]:
    """Return how many configurations are listed for fprop, dgrad and wgrad."""
    return [len(enumerator.listed(conv(op, **changes))) for op in ConvOp]


def _pairs(configurations: tuple[EngineConfiguration, ...]) -> list[tuple[str, int]]:
    return [(configuration.id, configuration.workspace_bytes) for configuration in configurations]


def test_a_list_is_in_cudnns_order_and_without_repetition(enumerator: Enumerator) -> None:
    listed = enumerator.listed(conv())

    assert [configuration.rank for configuration in listed] == list(range(36))
    assert len({configuration.id for configuration in listed}) == 36
    assert [configuration.source for configuration in listed] == [Source.A] * 33 + [Source.FALLBACK] * 3


def test_candidates_are_the_list_pruned_to_16(enumerator: Enumerator) -> None:
    listed, candidates = enumerator.listed(conv()), enumerator.candidates(conv())

    assert len(candidates) == 16
    assert candidates[:6] == listed[:6]
    assert set(candidates) < set(listed)


def test_what_is_compiled_at_run_time_is_measured_where_it_is_recommended_alone(
    enumerator: Enumerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *others, last = enumerator.listed(conv())[:8]
    notes = ("RUNTIME_COMPILATION",)
    recommended = dataclasses.replace(second, notes=notes, source=Source.A)
    fallback = dataclasses.replace(last, notes=notes, source=Source.FALLBACK)
    listed = (first, recommended, *others, fallback)
    monkeypatch.setattr(enumerator, "listed", lambda *_: listed)

    assert enumerator.candidates(conv()) == listed[:-1]
    assert enumerator.candidates(conv(), Search.EXHAUSTIVE) == listed
    listed = (fallback,)
    assert enumerator.candidates(conv()) == listed  # better than nothing


def test_an_unsupported_problem_has_no_engines(enumerator: Enumerator) -> None:
    assert enumerator.listed(conv(batch=0)) == ()
    assert enumerator.configuration(conv(batch=0), 0, ()) is None
    with pytest.raises(BackendError, match=r"^The batch must hold a sample at least, but got 0\.$"):
        enumerator.plan(conv(batch=0), 0, (), accumulate=False)


def test_a_bias_changes_nothing(enumerator: Enumerator) -> None:
    assert enumerator.listed(conv(bias=True)) is enumerator.listed(conv())


@pytest.mark.lists
def test_below_16_bytes_of_alignment_almost_nothing_is_left(enumerator: Enumerator) -> None:
    assert _counts(enumerator, alignment_bytes=16) == [36, 39, 43]
    assert _counts(enumerator, alignment_bytes=8) == [3, 2, 3]
    assert _counts(enumerator, alignment_bytes=2) == [3, 2, 2]
    assert _counts(enumerator, alignment_bytes=4, dtype="float32") == [13, 7, 6]


def test_more_than_16_bytes_of_alignment_gain_nothing(enumerator: Enumerator) -> None:
    for op in ConvOp:
        assert enumerator.listed(conv(op, alignment_bytes=512)) == enumerator.listed(conv(op))


def test_contiguous_tensors_lose_little_by_alignment(enumerator: Enumerator) -> None:
    aligned, misaligned = (
        _counts(enumerator, alignment_bytes=alignment, **CONTIGUOUS) for alignment in (16, 2)
    )

    assert all(0 <= before - after <= 4 for before, after in zip(aligned, misaligned, strict=True))


@pytest.mark.parametrize(
    "changes",
    [{"kernel_size": (1, 1), "padding": (0, 0), "out_channels": 128, "batch": 64}, {"groups": 64}],
    ids=["1x1", "depthwise"],
)
def test_the_filters_layout_does_not_count_where_it_makes_no_difference(
    enumerator: Enumerator, changes: dict[str, object]
) -> None:
    for op in ConvOp:
        lists = [enumerator.listed(conv(op, filter_layout=layout, **changes)) for layout in Layout]

        assert lists[0] == lists[1]


def test_one_dimension_lists_what_one_row_lists(enumerator: Enumerator) -> None:
    row = {
        "input_size": (1, 16),
        "kernel_size": (1, 3),
        "stride": (1, 1),
        "padding": (0, 1),
        "dilation": (1, 1),
    }

    for op in ConvOp:
        listed = enumerator.listed(conv_in(1, op))
        assert len(listed) > 0
        assert listed == enumerator.listed(conv(op, **row))


@pytest.mark.lists
def test_one_dimension_and_three_are_listed(enumerator: Enumerator) -> None:
    assert [len(enumerator.listed(conv_in(1, op))) for op in ConvOp] == [35, 37, 41]
    assert [len(enumerator.listed(conv_in(3, op))) for op in ConvOp] == [34, 40, 43]


@pytest.mark.lists
def test_groups_and_depthwise_are_listed(enumerator: Enumerator) -> None:
    assert _counts(enumerator, groups=8) == [24, 22, 25]
    assert _counts(enumerator, groups=64) == [18, 19, 19]


@pytest.mark.lists
def test_dilation_is_listed(enumerator: Enumerator) -> None:
    assert _counts(enumerator, dilation=(2, 2), padding=(2, 2)) == [34, 38, 43]


@pytest.mark.lists
@pytest.mark.parametrize("size", [55, 56])
def test_a_transposed_convolution_is_dgrad_with_any_output_padding(enumerator: Enumerator, size: int) -> None:
    problem = conv(DGRAD, stride=(2, 2), input_size=(size, size))

    assert problem.output_size == (28, 28)
    assert len(enumerator.listed(problem)) == 41


def test_mixed_layouts_are_another_problem_with_a_workspace_of_its_own(enumerator: Enumerator) -> None:
    uniform = enumerator.listed(conv())
    mixed = enumerator.listed(conv(filter_layout=Layout.CONTIGUOUS))

    assert (len(uniform), len(mixed)) == (36, 36)
    assert uniform != mixed


@pytest.mark.lists
def test_double_precision_has_few_engines(enumerator: Enumerator) -> None:
    assert _counts(enumerator, dtype="float64") == [4, 6, 5]


def test_double_precision_has_no_tensor_cores(enumerator: Enumerator) -> None:
    assert not any(
        "TENSOR_CORE" in configuration.notes
        for op in ConvOp
        for configuration in enumerator.listed(conv(op, dtype="float64"))
    )


@pytest.mark.lists
def test_half_has_more_engines_than_bfloat16(enumerator: Enumerator) -> None:
    assert _counts(enumerator, dtype="float16") == [43, 43, 43]
    assert _counts(enumerator, dtype="bfloat16") == [36, 39, 43]


def test_without_tf32_float32_lists_what_has_no_tensor_cores(
    library: Library, enumerator: Enumerator
) -> None:
    strict = Enumerator(library, device_described("h200"), Rules(allow_tf32=False))

    for op in ConvOp:
        listed = enumerator.listed(conv(op, dtype="float32"))
        without = [one.id for one in listed if "TENSOR_CORE" not in one.notes]
        assert [one.id for one in strict.listed(conv(op, dtype="float32"))] == without
        assert 0 < len(without) < len(listed)


@pytest.mark.lists
def test_few_engines_are_without_tensor_cores(library: Library, enumerator: Enumerator) -> None:
    strict = Enumerator(library, device_described("h200"), Rules(allow_tf32=False))

    assert _counts(enumerator, dtype="float32") == [38, 34, 22]
    assert _counts(strict, dtype="float32") == [8, 7, 6]
    assert _counts(strict, dtype="bfloat16") == [36, 39, 43]


@pytest.mark.lists
def test_determinism_drops_what_is_not_deterministic(library: Library, enumerator: Enumerator) -> None:
    deterministic = Enumerator(library, device_described("h200"), Rules(deterministic=True))

    assert _counts(enumerator, dtype="float32") == [38, 34, 22]
    assert _counts(deterministic, dtype="float32") == [38, 32, 20]


def test_ranks_have_no_gaps_where_the_rules_drop_something(library: Library) -> None:
    listed = Enumerator(library, device_described("h200"), Rules(allow_tf32=False)).listed(
        conv(dtype="float32")
    )

    assert [configuration.rank for configuration in listed] == list(range(len(listed)))


@pytest.mark.lists
def test_other_devices_have_other_lists(library: Library) -> None:
    counts = [_counts(Enumerator(library, device_described(name))) for name in DEVICES]

    assert counts == [[36, 39, 43], [36, 39, 43], [30, 36, 32]]


def test_only_single_and_double_precision_wgrad_accumulates_by_beta() -> None:
    accumulating = {
        (op, dtype)
        for op in ConvOp
        for dtype in ("float16", "bfloat16", "float32", "float64")
        if accumulates_by_beta(conv(op, dtype=dtype))
    }

    assert accumulating == {(WGRAD, "float32"), (WGRAD, "float64")}


@pytest.mark.parametrize(
    "problem", [conv(FPROP, dtype="float32"), conv(DGRAD, dtype="float32"), conv(WGRAD)], ids=str
)
def test_what_does_not_accumulate_by_beta_declares_no_workspace_for_it(
    enumerator: Enumerator, problem: ConvProblem
) -> None:
    assert {one.accumulating_bytes for one in enumerator.listed(problem)} == {None}


def test_the_declared_workspace_is_the_larger_of_beta_0_and_beta_1(enumerator: Enumerator) -> None:
    problem = next(one for one in problems_of(LAYERS["alex2"], "float32") if one.op is WGRAD)

    for one in enumerator.listed(problem):
        overwriting, accumulating = (
            enumerator.plan(problem, one.engine, one.knobs, accumulate).int_value(Attribute.PLAN_WORKSPACE)
            for accumulate in (False, True)
        )
        assert one.workspace_bytes == max(overwriting, accumulating)
        assert one.accumulating_bytes == accumulating


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_plan_is_rebuilt_from_its_engine_and_knobs(enumerator: Enumerator, op: ConvOp, dtype: str) -> None:
    problem = conv(op, dtype=dtype, **CONTIGUOUS)

    for one in enumerator.listed(problem):
        rebuilt = enumerator.configuration(problem, one.engine, one.knobs)
        assert rebuilt is not None
        assert (rebuilt.id, rebuilt.notes) == (one.id, one.notes)
        assert rebuilt.workspace_bytes == one.workspace_bytes
        assert rebuilt.accumulating_bytes == one.accumulating_bytes
        assert (rebuilt.source, rebuilt.rank) == (Source.REBUILT, -1)


@pytest.mark.parametrize("op", ConvOp)
def test_a_configuration_of_one_batch_is_rebuilt_at_another(enumerator: Enumerator, op: ConvOp) -> None:
    whole, part = conv(op, batch=32, **CONTIGUOUS), conv(op, batch=5, **CONTIGUOUS)

    for one in enumerator.listed(whole):
        rebuilt = enumerator.configuration(part, one.engine, one.knobs)
        plan = enumerator.plan(part, one.engine, one.knobs, accumulate=False)
        assert rebuilt is not None
        assert rebuilt.workspace_bytes == plan.int_value(Attribute.PLAN_WORKSPACE)


def test_what_the_rules_forbid_is_not_rebuilt(library: Library, enumerator: Enumerator) -> None:
    strict = Enumerator(library, device_described("h200"), Rules(allow_tf32=False))
    first = enumerator.listed(conv(dtype="float32"))[0]

    assert "TENSOR_CORE" in first.notes
    assert strict.configuration(conv(dtype="float32"), first.engine, first.knobs) is None


def test_what_is_not_supported_here_is_not_rebuilt(enumerator: Enumerator) -> None:
    first = enumerator.listed(conv())[0]

    assert enumerator.configuration(conv(dtype="float64"), first.engine, first.knobs) is None
    with pytest.raises(CudnnError, match=r"\(3\d\d\d\)"):
        enumerator.plan(conv(dtype="float64"), first.engine, first.knobs, accumulate=False)


@pytest.mark.parametrize("op", ConvOp)
def test_an_exhaustive_search_finds_further_engines(enumerator: Enumerator, op: ConvOp) -> None:
    problem = conv(op, dtype="float32")
    listed = enumerator.listed(problem)

    found = enumerator.candidates(problem, Search.EXHAUSTIVE)

    further = found[len(listed) :]
    assert found[: len(listed)] == listed
    assert {one.source for one in further} == {Source.SCAN}
    assert not {one.engine for one in listed} & {one.engine for one in further}


@pytest.mark.lists
def test_an_exhaustive_search_finds_few_engines_more(enumerator: Enumerator) -> None:
    problems = [conv(op, dtype="float32") for op in ConvOp]
    counts = [
        (len(enumerator.listed(one)), len(enumerator.candidates(one, Search.EXHAUSTIVE))) for one in problems
    ]

    assert counts == [(38, 38 + 1), (34, 34 + 3), (22, 22 + 4)]


def _unlisted(enumerator: Enumerator, problem: ConvProblem) -> list[EngineConfiguration]:
    """Return what an exhaustive search finds beyond cuDNN's list, by default knobs."""
    return list(enumerator.candidates(problem, Search.EXHAUSTIVE)[len(enumerator.listed(problem)) :])


def _note(monkeypatch: pytest.MonkeyPatch, note: str, engine: int) -> None:
    """Have an engine bear one more note: without a driver no transform offers itself."""

    def notes(descriptor: Descriptor) -> tuple[str, ...]:
        number = descriptor.int_value(Attribute.ENGINE_NUMBER)
        return noted(descriptor) + ((note,) if number == engine else ())

    noted = offers._notes
    monkeypatch.setattr(offers, "_notes", notes)


@pytest.mark.parametrize("note", ["FFT", "WINOGRAD"])
@pytest.mark.parametrize("op", ConvOp)
def test_a_transform_that_no_list_has_is_a_candidate_in_float32(
    library: Library, enumerator: Enumerator, monkeypatch: pytest.MonkeyPatch, op: ConvOp, note: str
) -> None:
    problem = conv(op, dtype="float32", bias=op is FPROP)
    without, listed = enumerator.candidates(problem), enumerator.listed(problem)
    unlisted = _unlisted(enumerator, problem)[-1]
    _note(monkeypatch, note, unlisted.engine)

    *others, transform = Enumerator(library, device_described("h200")).candidates(problem)

    assert tuple(others) == without
    assert transform == dataclasses.replace(unlisted, notes=(*unlisted.notes, note), rank=len(listed))
    assert (transform.source, transform.knobs) == (Source.SCAN, ())


@pytest.mark.parametrize(("note", "is_tried"), [("FFT", True), ("WINOGRAD", False)])
def test_for_more_than_3_taps_it_is_fouriers_alone(
    library: Library, enumerator: Enumerator, monkeypatch: pytest.MonkeyPatch, note: str, is_tried: bool
) -> None:
    problem = conv(dtype="float32", kernel_size=(5, 5), padding=(2, 2))
    engine = _unlisted(enumerator, problem)[-1].engine
    _note(monkeypatch, note, engine)

    tried = Enumerator(library, device_described("h200")).candidates(problem)

    assert (engine in {one.engine for one in tried}) == is_tried


def test_a_transform_that_is_listed_is_a_candidate_once(
    library: Library, enumerator: Enumerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = conv(dtype="float32")
    listed = enumerator.candidates(problem)
    _note(monkeypatch, "FFT", listed[0].engine)

    noted = Enumerator(library, device_described("h200")).candidates(problem)

    assert _pairs(noted) == _pairs(listed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_transform_that_no_list_has_is_left_out_where_tensor_cores_are_faster(
    library: Library, enumerator: Enumerator, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    problem = conv(dtype=dtype)
    without = enumerator.candidates(problem)
    _note(monkeypatch, "FFT", _unlisted(enumerator, problem)[-1].engine)

    assert Enumerator(library, device_described("h200")).candidates(problem) == without


def test_a_transform_that_the_rules_forbid_is_no_candidate(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = Enumerator(library, device_described("h200"), Rules(allow_tf32=False))
    problem = conv(dtype="float32")
    forbidden = next(
        one.engine
        for one in Enumerator(library, device_described("h200")).listed(problem)
        if "TENSOR_CORE" in one.notes
    )
    _note(monkeypatch, "FFT", forbidden)

    assert forbidden not in {one.engine for one in strict.candidates(problem)}


def test_explicit_gemm_asks_for_the_whole_im2col_matrix(enumerator: Enumerator) -> None:
    problem = conv(
        batch=128,
        in_channels=96,
        out_channels=256,
        input_size=(27, 27),
        kernel_size=(5, 5),
        padding=(2, 2),
        dtype="float32",
        **CONTIGUOUS,
    )

    (gemm,) = [one for one in enumerator.listed(problem, Search.EXHAUSTIVE) if one.engine == 2]

    assert gemm.id == "cudnn:eng2"
    assert gemm.workspace_bytes == (96 * 5 * 5) * (128 * 27 * 27) * 4


def test_the_workspace_of_a_contiguous_first_choice_is_a_copy_of_all_tensors(
    enumerator: Enumerator,
) -> None:
    problem = next(problems_of(LAYERS["vgg_c12"], "bfloat16"))
    first = enumerator.listed(problem)[0]

    assert (problem.op, problem.batch) == (FPROP, 256)
    copies = problem.input_bytes + problem.output_bytes + problem.filter_bytes
    assert 0 <= first.workspace_bytes - copies < 256


def test_six_threads_at_once_find_the_same_lists(library: Library, enumerator: Enumerator) -> None:
    problems = [conv(op, batch=batch) for op in ConvOp for batch in (16, 8, 4, 2)]
    fresh = Enumerator(library, device_described("h200"))

    with ThreadPoolExecutor(6) as threads:
        lists = list(threads.map(lambda problem: _pairs(fresh.listed(problem)), problems * 2))

    assert lists == [_pairs(enumerator.listed(problem)) for problem in problems] * 2
