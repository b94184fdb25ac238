"""The results of a machine as files: `env.json`, the lines, and the summary that is made of them."""

import datetime
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from bench.cpu.ground import Ground, step_code
from bench.cpu.layers import ALL
from bench.cpu.lines import Line, Recording, to_text
from bench.cpu.summary import summary
from mucudnn.plan_file import encode
from mucudnn.version import __version__

_LARGEST_BYTES = 2**20
"""Lines beyond this are compressed: a repository keeps every version of a file."""

ENVIRONMENT = "env.json"
LINES = "layers.jsonl"
STEPS = "steps.jsonl"
SUMMARY = "summary.md"


def write(
    folder: Path, ground: Ground, lines: Sequence[Line], command: str, steps: Sequence[Line] = ()
) -> None:
    """Write the results of one ground, in place of what the folder held.

    Args:
        folder: where to; it is made if need be.
        ground: of the lines.
        lines: all that was measured of layers on it.
        command: that was given, for the record.
        steps: all that was measured of training steps on it, by the present code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recording = Recording.of([*lines, *steps])
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    settings = {name: encode(started.environment) for name, started in recording.started.items()}
    run = {
        "date": date,
        "command": command,
        "mucudnn": __version__,
        "code": ground.code,
        "step code": step_code(),
    }
    content = {**run, "ground": ground.environment.to_json(), "settings": settings}
    _write_text(folder / ENVIRONMENT, json.dumps(content, indent=1, sort_keys=True) + "\n")
    _write_lines(folder / LINES, lines)
    _write_lines(folder / STEPS, steps)
    _write_text(folder / SUMMARY, summary(recording, ALL, _header(ground, run)))


def _header(ground: Ground, run: dict[str, str]) -> dict[str, str]:
    device = ", ".join(f"{name} {fact}" for name, fact in ground.environment.device.items())
    software = ", ".join(f"{name} {fact}" for name, fact in ground.environment.software.items())
    soft = ", ".join(f"{name} {fact}" for name, fact in ground.environment.soft.items())
    return {"machine": device, "software": software, "system": soft, **run}


def _write_lines(plain: Path, lines: Sequence[Line]) -> None:
    """Write the lines, compressed if they are many; the other form goes."""
    packed = plain.with_name(f"{plain.name}.gz")
    content = "".join(to_text(line) + "\n" for line in lines).encode()
    if len(content) > _LARGEST_BYTES:
        packed.write_bytes(gzip.compress(content, mtime=0))  # the same lines give the same bytes
        plain.unlink(missing_ok=True)
    else:
        plain.write_bytes(content)
        packed.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
