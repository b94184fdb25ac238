"""The results of a machine as files: `env.json`, the lines, and the summary and pictures made of them."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.cpu import measure, step_models
from bench.cpu.child import LINES
from bench.cpu.ground import Ground, step_code
from bench.cpu.layers import ALL
from bench.cpu.lines import Line, Recording, read_packed_too, write_lines
from bench.cpu.pictures import PICTURES, pictures
from bench.cpu.step_child import LINES as STEPS
from bench.cpu.summary import summary
from bench.cpu.way_child import LINES as WAYS
from mucudnn.plan_file import encode
from mucudnn.profile import Environment
from mucudnn.report import describe_facts
from mucudnn.version import __version__

_RUN = ("date", "command", "mucudnn", "commit", "code", "step code")
"""What a run says of itself; results of older versions name no commit."""

ENVIRONMENT = "env.json"
SUMMARY = "summary.md"


def write(
    folder: Path,
    ground: Ground,
    lines: Sequence[Line],
    command: str,
    steps: Sequence[Line] = (),
    version: str = "unknown",
    ways: Sequence[Line] = (),
) -> None:
    """Write the results of one ground, in place of what the folder held.

    Args:
        folder: where to; it is made if need be.
        ground: of the lines.
        lines: all that was measured of layers on it.
        command: that was given, for the record.
        steps: all that was measured of training steps on it, by the present code.
        ways: all that was measured of networks in all ways, likewise.
        version: the commit that the last run began with; `code` tells what lines of earlier ones depend on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recording = Recording.of([*lines, *steps, *ways])
    settings = {name: encode(started.environment) for name, started in recording.started.items()}
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "mucudnn": __version__,
        "commit": version,
        "code": ground.code,
        "step code": step_code(),
    }
    states = {"operands of layers": measure.SEED, "weights and data of steps": step_models.SEED}
    everything = {
        **run,
        "random states": states,
        "ground": ground.environment.to_json(),
        "settings": settings,
    }
    _write_text(folder / ENVIRONMENT, json.dumps(everything, indent=1, sort_keys=True) + "\n")
    write_lines(folder / LINES, lines)
    write_lines(folder / STEPS, steps)
    write_lines(folder / WAYS, ways)
    if not ways:
        (folder / WAYS).unlink()
    _tell(folder, recording, ground.environment, run)


def retell(folder: Path) -> None:
    """Write the summary and the pictures of a folder anew, from what else it holds.

    Raises:
        OSError, EOFError: it has no `env.json`, cannot be written to, or has a packed file that is cut off.
        ValueError, KeyError, TypeError: `env.json` is not what `write` wrote.
    """
    everything = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    run = {name: everything[name] for name in _RUN if name in everything}
    lines = [line for name in (LINES, STEPS, WAYS) for line in read_packed_too(folder / name)]
    _tell(folder, Recording.of(lines), Environment(**everything["ground"]), run)


def _tell(folder: Path, recording: Recording, environment: Environment, run: Mapping[str, str]) -> None:
    """Write what people read: the summary, with pictures beside it."""
    drawn = pictures(recording, ALL)
    for name in PICTURES:
        (folder / name).unlink(missing_ok=True)
    for name, content in drawn.items():
        (folder / name).write_bytes(content)
    facts = {
        "machine": describe_facts(environment.device),
        "software": describe_facts(environment.software),
        "system": describe_facts(environment.soft),
        **run,
    }
    _write_text(folder / SUMMARY, summary(recording, ALL, facts, [*drawn]))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
