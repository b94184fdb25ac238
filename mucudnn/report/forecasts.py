"""Forecasts as text and as JSON values: what every convolution's plans would take as workspace."""

from collections.abc import Mapping

from mucudnn.forecast import Fit, Forecast, Need, ProblemForecast, SiteForecast, Total
from mucudnn.problem import Layout
from mucudnn.report.forecast_table import forecast_table
from mucudnn.report.words import DEFAULT_WIDTH, render_notes
from mucudnn.sizes import format_bytes
from mucudnn.version import __version__

_TITLE = "Workspace in MiB of the first-ranked plan, undivided and by micro-batch size:"
_FIGURES = (
    "Workspaces are the library's own figures for the device named above, which need not be present. The "
    "first-ranked plan is the one that the library predicts to be the fastest; least is the least workspace "
    "of all plans that it lists. Engines that the library compiles at run time are listed only on the card "
    "itself. Nothing was run and no time was measured."
)
_COLUMNS = (
    "sites: how many are alike. least, at: the least workspace with which any plans at any sizes make up the "
    "batch, and the largest size that needs it. {}plans: how many the library lists for the undivided batch."
)
_FITS = (
    "fits: the largest micro-batch whose first-ranked plan is within the limit; whole: the undivided batch; "
    "other plan: only lower-ranked plans are; never: none is. "
)
_PARTS = (
    "A batch that is no multiple of a size ends with smaller parts. For a part of a weight gradient in 16 "
    "bits, the float32 sum of the parts is counted, too; in 32 and 64 bits, what the plan needs to add to "
    "the parts before, if that is more."
)
_LAYOUT = (
    "At {} tensors are contiguous (channels before space), but the first-ranked plan computes on "
    "tensor cores, and so on copies with the channels last. A model in channels_last needs few such copies: "
    "that is the honest baseline for any saving, and --channels-last shows it."
)
_TRANSPOSED = "The forward pass of a transposed convolution is dgrad, the gradient of its input fprop."


def render_forecast(
    forecast: Forecast,
    limit_bytes: int | None = None,
    *,
    width: int = DEFAULT_WIDTH,
    names_sites: bool = False,
) -> str:
    """Return a forecast for people to read: a row for each op of each distinct convolution, then totals.

    Plain text, without a line break at its end. As many micro-batch sizes have a column as fit.

    Args:
        forecast: what is told.
        limit_bytes: a workspace limit for each site, with which the rows say what fits.
        width: columns of a line; only names and numbers of unusual length make it longer.
        names_sites: whether a convolution that occurs several times names all its sites.
    """
    table = forecast_table(forecast, limit_bytes, width, names_sites)
    notes = render_notes([*_left_out(table.left_out), *_notes(forecast, limit_bytes)], width)
    return "\n".join([_TITLE, "", *table.lines, "", *notes])


def forecast_as_json(forecast: Forecast, limit_bytes: int | None = None) -> dict[str, object]:
    """Return a forecast as JSON values, all micro-batch sizes included; null where there is no plan."""
    return {
        "report": "forecast",
        "version": __version__,
        "device": forecast.device,
        "library": forecast.library,
        "settings": list(forecast.settings),
        "policy": forecast.policy,
        "limit_bytes": limit_bytes,
        "totals": {
            "undivided": _total_as_json(forecast.undivided),
            "best": _total_as_json(forecast.best),
            "least": _total_as_json(forecast.least),
        },
        "sites": [_site_as_json(site, limit_bytes) for site in forecast.sites],
    }


# The notes below the table


def _left_out(sizes: int) -> list[tuple[str, str]]:
    """Say for how many sizes there was no room."""
    text = f"Number of sizes that have no column for want of room: {sizes}; --json shows all."
    return [("left out", text)] if sizes else []


def _notes(forecast: Forecast, limit_bytes: int | None) -> list[tuple[str, str]]:
    settings = [("settings", ", ".join(forecast.settings))] if forecast.settings else []
    return [
        ("device", forecast.device),
        ("library", forecast.library),
        *settings,
        ("sites", f"{len(forecast.sites)}, with {len(forecast.forecasts)} distinct problems"),
        ("undivided", f"First-ranked plans need {_total(forecast.undivided)}."),
        ("best size", f"First-ranked plans, each at the size that needs least: {_total(forecast.best)}."),
        ("least", f"Whatever plan and size: {_total(forecast.least)}.{_off_tensor_cores(forecast)}"),
        *_limit_notes(forecast, limit_bytes),
        *_layout_notes(forecast),
        *_transposed_notes(forecast),
        ("columns", _COLUMNS.format("" if limit_bytes is None else _FITS)),
        ("figures", _FIGURES),
        ("parts", _PARTS),
    ]


def _total(total: Total) -> str:
    if total.unknown and total.largest is None:
        return "an unknown amount: no site has such a plan"
    where = f" ({total.largest})" if total.largest and total.largest_bytes else ""
    if total.unknown:
        where += f", {total.unknown} sites without such a plan not counted"
    return (
        f"{format_bytes(total.sum_bytes)} all together, where each site owns its workspace; "
        f"{format_bytes(total.largest_bytes)} in one buffer that all reuse{where}"
    )


def _off_tensor_cores(forecast: Forecast) -> str:
    """Say at how many sites the plan of least workspace does without the tensor cores of the first-ranked."""
    using = [site.forecast for site in forecast.sites if _uses_tensor_cores(site.forecast.undivided)]
    leaving = sum(each.least is not None and not each.least.least_on_tensor_cores for each in using)
    if not leaving:
        return ""
    return (
        f" At {leaving} of the {len(using)} sites whose first-ranked plan computes on tensor cores, no plan "
        "with so little workspace does."
    )


def _uses_tensor_cores(need: Need | None) -> bool:
    return need is not None and need.on_tensor_cores


def _limit_notes(forecast: Forecast, limit_bytes: int | None) -> list[tuple[str, str]]:
    if limit_bytes is None:
        return []
    by_fit: dict[Fit, list[SiteForecast]] = {fit: [] for fit in Fit}
    for site in forecast.sites:
        by_fit[site.forecast.fit(limit_bytes)].append(site)
    text = (
        f"Sites that fit into {format_bytes(limit_bytes)} with the first-ranked plan undivided: "
        f"{len(by_fit[Fit.UNDIVIDED])}; with that of a micro-batch: {len(by_fit[Fit.DIVIDED])}; with a "
        f"lower-ranked plan only: {len(by_fit[Fit.LOWER_RANKED])}; not at all: {len(by_fit[Fit.NEVER])}"
    )
    if by_fit[Fit.NO_PLAN]:
        text += f"; without any plan here: {len(by_fit[Fit.NO_PLAN])}"
    never = ", ".join(str(site.occurrence.site) for site in by_fit[Fit.NEVER])
    return [("limit", f"{text}{never and f' ({never})'}.")]


def _layout_notes(forecast: Forecast) -> list[tuple[str, str]]:
    """Name the honest baseline where the contiguous layout makes tensor cores work on copies."""
    copying = sum(
        site.forecast.problem.layout is Layout.CONTIGUOUS
        and len(site.forecast.problem.input_size) > 1
        and _uses_tensor_cores(site.forecast.undivided)
        for site in forecast.sites
    )
    return [("layout", _LAYOUT.format("1 site" if copying == 1 else f"{copying} sites"))] if copying else []


def _transposed_notes(forecast: Forecast) -> list[tuple[str, str]]:
    has_any = any(site.occurrence.is_transposed for site in forecast.sites)
    return [("transposed", _TRANSPOSED)] if has_any else []


# JSON


def _total_as_json(total: Total) -> dict[str, object]:
    is_unknown = total.unknown > 0 and total.largest is None
    return {
        "sum_bytes": None if is_unknown else total.sum_bytes,
        "largest_bytes": None if is_unknown else total.largest_bytes,
        "largest": None if total.largest is None else str(total.largest),
        "sites_without_plan": total.unknown,
    }


def _site_as_json(site: SiteForecast, limit_bytes: int | None) -> dict[str, object]:
    where, each = site.occurrence.site, site.forecast
    return {
        "path": where.path,
        "op": where.op,
        "variant": where.variant,
        "is_transposed": site.occurrence.is_transposed,
        "problem": site.occurrence.problem.to_json(),
        "undivided_bytes": each.undivided_bytes,
        "best": _at_size(each.best, each.best_bytes),
        "least": _at_size(each.least, each.least_bytes),
        "limit": None if limit_bytes is None else _fit_as_json(each, limit_bytes),
        "sizes": [_need_as_json(need) for need in each.needs],
    }


def _at_size(need: Need | None, workspace_bytes: int | None) -> Mapping[str, object] | None:
    return None if need is None else {"batch": need.batch, "workspace_bytes": workspace_bytes}


def _fit_as_json(each: ProblemForecast, limit_bytes: int) -> dict[str, object]:
    largest = each.largest_within(limit_bytes)
    return {"fit": each.fit(limit_bytes), "largest_batch": None if largest is None else largest.batch}


def _need_as_json(need: Need) -> dict[str, object]:
    return {
        "batch": need.batch,
        "plans": need.plans,
        "first_bytes": need.first_bytes,
        "least_bytes": need.least_bytes,
        "on_tensor_cores": need.on_tensor_cores,
        "least_on_tensor_cores": need.least_on_tensor_cores,
    }
