"""Plans, forecasts and steps as text, as JSON values and as pictures; measures nothing, never loads torch."""

from mucudnn.report.drawing import check_matplotlib, checked_kind
from mucudnn.report.forecast_picture import draw_forecast
from mucudnn.report.forecasts import forecast_as_json, render_forecast
from mucudnn.report.plan_picture import draw_plan
from mucudnn.report.plan_values import plan_as_json
from mucudnn.report.plans import describe_runs, render_plan
from mucudnn.report.refusals import refusals_as_json, refusals_of, render_refusals
from mucudnn.report.step_picture import draw_comparison
from mucudnn.report.steps import comparison_as_json, render_comparison
from mucudnn.report.totals import CallTotals, Totals
from mucudnn.report.words import (
    DEFAULT_WIDTH,
    describe_environment,
    describe_facts,
    describe_shape,
    render_notes,
)

__all__ = [
    "DEFAULT_WIDTH",
    "CallTotals",
    "Totals",
    "check_matplotlib",
    "checked_kind",
    "comparison_as_json",
    "describe_environment",
    "describe_facts",
    "describe_runs",
    "describe_shape",
    "draw_comparison",
    "draw_forecast",
    "draw_plan",
    "forecast_as_json",
    "plan_as_json",
    "refusals_as_json",
    "refusals_of",
    "render_comparison",
    "render_forecast",
    "render_notes",
    "render_plan",
    "render_refusals",
]
