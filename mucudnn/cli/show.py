"""`mucudnn show`: a saved plan."""

from pathlib import Path

import click

from mucudnn.choices import PREFIX
from mucudnn.cli.options import FILE, PLAN, brief_option, json_option, plot_option
from mucudnn.cli.output import print_json, print_report, report_width, say
from mucudnn.errors import StoreError
from mucudnn.plan import Plan
from mucudnn.profiling.replay import recorded_store
from mucudnn.report import (
    draw_plan,
    plan_as_json,
    refusals_as_json,
    refusals_of,
    render_plan,
    render_refusals,
)
from mucudnn.store import SqliteStore, default_path, expanded, readable_store


@click.command("show", short_help="Show or draw a saved plan.")
@click.argument("path", type=PLAN, metavar="PLAN")
@click.option(
    "--refusals", "with_refusals", is_flag=True, help="List the algorithms that were refused, and why."
)
@click.option(
    "--store",
    type=FILE,
    help="For --refusals: the store that the plan was made from, or the recording, such as replay:h200.  "
    "[default: as mucudnn info says]",
)
@plot_option
@brief_option
@json_option
def show_command(
    path: Path, with_refusals: bool, store: Path | None, plot: Path | None, brief: bool, as_json: bool
) -> None:
    """Show a saved plan: what ran before, what runs now, and what that gains.

    \b
    Example:
      mucudnn show plan.json
      mucudnn show plan.json --refusals
      mucudnn show plan.json --plot plan.html
    """
    if store is not None and not with_refusals:
        raise click.BadParameter("only --refusals reads a store.", param_hint="'--store'")
    plan = Plan.load(path)
    if plot is not None:
        draw_plan(plan, plot)  # before anything is printed: whoever reads that may leave
    if not with_refusals:
        print_plan(plan, as_json, brief=brief)
    else:
        with _opened(store) as opened:
            refusals = refusals_of(plan, opened)
        if as_json:
            print_json({**plan_as_json(plan), **refusals_as_json(plan, refusals)})
        else:
            print_report(f"{_rendered(plan, brief)}\n\n{render_refusals(plan, refusals, report_width())}")
    if plot is not None:
        say(f"It is drawn in {plot}.", as_json)


def _opened(store: Path | None) -> SqliteStore:
    """Return the store that --store names, a file or a recording, or the user's."""
    if store is not None and str(store).startswith(PREFIX):
        return recorded_store(str(store).removeprefix(PREFIX))
    try:
        return readable_store(expanded(store or default_path()))
    except StoreError as error:
        hint = " For a plan from a recording give --store replay:NAME." if store is None else ""
        raise StoreError(f"{error}{hint}") from error


def print_plan(plan: Plan, as_json: bool, *, brief: bool = False) -> None:
    """Print a plan to standard output, as text or as JSON."""
    if as_json:
        print_json(plan_as_json(plan))
    else:
        print_report(_rendered(plan, brief))


def _rendered(plan: Plan, brief: bool) -> str:
    """Return the text of a plan, its notes in lines that fit into the terminal."""
    return render_plan(plan, width=report_width(), brief=brief)
