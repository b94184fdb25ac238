"""cuDNN 9.19 offers a described H200 what the kept table says: 408 problems of ten layers."""

from collections.abc import Mapping

import pytest

from bench.gpu.layers import DTYPES, LAYERS
from mucudnn.backends.cudnn.configurations import EngineConfiguration
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.engines import Enumerator, accumulates_by_beta
from mucudnn.backends.cudnn.library import Library
from mucudnn.problem import ConvOp, ConvProblem
from tests.cudnn.problems import problems_of
from tests.cudnn.table import Case, Row, all_problems, case_of, read_table


@pytest.fixture(scope="module")
def table() -> Mapping[str, Case]:
    return read_table()


def _configuration(problem: ConvProblem, row: Row) -> EngineConfiguration:
    accumulating = row.beta_1_bytes if accumulates_by_beta(problem) else None
    return EngineConfiguration(
        engine=row.engine,
        knobs=row.knobs,
        notes=row.notes,
        overwriting_bytes=row.workspace_bytes,
        accumulating_bytes=accumulating,
        source=row.source,
        rank=row.rank,
    )


def test_the_table_has_408_problems_and_6327_configurations(table: Mapping[str, Case]) -> None:
    assert list(table) == [problem.key for problem in all_problems()]
    assert len(table) == 408
    assert sum(len(case.rows) for case in table.values()) == 6327


def test_beta_1_costs_wgrad_one_dw_at_most_and_the_others_nothing(table: Mapping[str, Case]) -> None:
    for problem in all_problems():
        extra = {row.beta_1_bytes - row.workspace_bytes for row in table[problem.key].rows}
        most = problem.filter_bytes + 16 if problem.op is ConvOp.WGRAD else 0
        least = -16 if problem.op is ConvOp.WGRAD else 0
        assert least <= min(extra) <= max(extra) <= most


def test_every_problem_has_a_candidate_without_workspace(table: Mapping[str, Case]) -> None:
    needy = [key for key, case in table.items() if min(row.workspace_bytes for row in case.rows) > 0]

    assert needy == []


@pytest.mark.lists
@pytest.mark.deviceless
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_cudnn_offers_what_the_table_says(
    library: Library, h200: Descriptor, table: Mapping[str, Case], layer: str, dtype: str
) -> None:
    for problem in problems_of(LAYERS[layer], dtype):
        assert case_of(library, h200, problem) == table[problem.key], problem


@pytest.mark.lists
@pytest.mark.deviceless
@pytest.mark.parametrize("layer", LAYERS)
def test_the_enumerator_lists_what_the_table_says(
    enumerator: Enumerator, table: Mapping[str, Case], layer: str
) -> None:
    for dtype in DTYPES:
        for problem in problems_of(LAYERS[layer], dtype):
            listed, case = enumerator.listed(problem), table[problem.key]
            assert len(listed) == case.listed
            for row in case.rows:
                assert listed[row.rank] == _configuration(problem, row)
