"""`mucudnn show`: a saved plan."""

from pathlib import Path

import click

from mucudnn.cli.options import json_option
from mucudnn.cli.output import print_json
from mucudnn.plan import Plan
from mucudnn.report import plan_as_json, render_plan


@click.command("show")
@click.argument("path", type=click.Path(path_type=Path), metavar="PLAN")
@json_option
def show_command(path: Path, as_json: bool) -> None:
    """Show a saved plan: what ran before, what runs now, and what that gains.

    \b
    Example:
      mucudnn show plan.json
    """
    print_plan(Plan.load(path), as_json)


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print a plan to standard output, as text or as JSON."""
    if as_json:
        print_json(plan_as_json(plan))
    else:
        click.echo(render_plan(plan))
