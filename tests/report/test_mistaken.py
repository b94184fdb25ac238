"""Reports of what is none of what they tell of."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import mucudnn
from mucudnn.errors import OptionError
from mucudnn.report import (
    comparison_as_json,
    draw_comparison,
    draw_plan,
    plan_as_json,
    render_comparison,
    render_plan,
)
from tests.report.plans import a_mixed_plan

PAGE = Path("none.html")


@pytest.mark.parametrize("tell", [render_plan, plan_as_json, partial(draw_plan, path=PAGE)])
def test_what_is_no_plan_is_answered_with_what_gives_one(tell: Callable[[Any], object]) -> None:
    message = r"^A Plan is needed, as mucudnn\.plan_of\(model\) returns one, but got ReLU\.$"
    with pytest.raises(OptionError, match=message):
        tell(nn.ReLU())


@pytest.mark.parametrize("tell", [render_comparison, comparison_as_json, partial(draw_comparison, path=PAGE)])
def test_what_is_no_comparison_is_answered_with_what_gives_one(tell: Callable[[Any], object]) -> None:
    message = r"^A StepComparison is needed, as mucudnn\.compare\(.*\) returns one, but got Plan\.$"
    with pytest.raises(OptionError, match=message):
        tell(a_mixed_plan())


def test_reports_are_found_where_plans_say() -> None:
    assert "report" in dir(mucudnn)
    assert "`mucudnn.report.render_plan`" in repr(a_mixed_plan())
    assert mucudnn.report.render_plan is render_plan
