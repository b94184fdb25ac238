"""The results of a device as files: one of JSON for each section, and a README that is made from them."""

import datetime
import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from bench.commit import commit
from bench.cpu.markdown import markdown
from bench.gpu.sections import Result
from bench.gpu.values import Answer, Timing, jsonable
from mucudnn.sizes import format_bytes
from mucudnn.version import __version__

_MOST_ROWS = 130
"""Longer tables stay in the files."""

_ROW_DEPTH = 3
"""Of a table's rows in the file: below its sections, its tables, and their titles."""

_NAMES = {"layer": "layer", "op": "op", "setting": "type and layout", "batch": "N"}
_HEADER_FACTS = ("name", "driver", "CUDA", "torch", "cuDNN", "cuDNN path", "compute capability", "SM clock")

_PREFACE = (
    "Written by `make gpu`; made from the JSON files beside it, which hold the raw samples too.",
    "Times are medians with 95 % intervals from ranks, by a clock that waits for the device, of spans of",
    "many calls in interleaved rounds; a time without an interval was seen fewer than six times.",
    "Operands are normal random values; errors are 2-norms relative to float64.",
)

Json = Mapping[str, object]

_present_commit = functools.cache(commit)
"""Of the sources that this process began with: a file is written every few seconds."""


def slug(name: str) -> str:
    """Return a device's name as a folder's: "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def path_of(folder: Path, section: str) -> Path:
    """Return where a section's results are kept."""
    return folder / f"{section}.json"


def write(folder: Path, result: Result, now: datetime.datetime) -> None:
    """Write what a section has found, in place of what it found before."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(_pieces(_content(result, now)))
    path = path_of(folder, result.section.name)
    beside = path.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)  # a process that dies here leaves what was there


def _pieces(value: object, depth: int = 0) -> Iterator[str]:
    """Yield JSON in which each row of a table takes one line."""
    if isinstance(value, dict) and value and depth < _ROW_DEPTH:
        yield "{\n"
        for number, (key, each) in enumerate(value.items()):
            yield (",\n" if number else "") + json.dumps(key) + ": "
            yield from _pieces(each, depth + 1)
        yield "\n}" if depth else "\n}\n"
    elif isinstance(value, list) and value:
        yield "[\n" + ",\n".join(_dumped(each) for each in value) + "\n]"
    else:
        yield _dumped(value)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _content(result: Result, now: datetime.datetime) -> Json:
    tables: dict[str, list[object]] = {}
    titles: dict[str, str] = {}
    for row in result.rows:
        name = type(row).__name__
        tables.setdefault(name, []).append(jsonable(row))
        titles[name] = (inspect.getdoc(type(row)) or name).partition("\n\n")[0].replace("\n", " ")
    return {
        "section": result.section.name,
        "about": result.section.about,
        "date": now.isoformat(timespec="seconds"),
        "seconds": round(result.seconds, 1),
        "version": __version__,
        "commit": _present_commit(),
        "failure": result.failure,
        "answers": jsonable(result.answers),
        "tables": {name: {"title": titles[name], "rows": rows} for name, rows in tables.items()},
    }


def read(folder: Path, sections: Sequence[str]) -> dict[str, Json]:
    """Return the contents of the files that are there, in the order of `sections`."""
    return {
        name: json.loads(path_of(folder, name).read_text(encoding="utf-8"))
        for name in sections
        if path_of(folder, name).exists()
    }


def failed(contents: Mapping[str, Json], sections: Sequence[str]) -> list[str]:
    """Return the sections that failed or have no results."""
    return [name for name in sections if name not in contents or contents[name]["failure"] is not None]


def answered(contents: Mapping[str, Json]) -> list[Answer]:
    """Return all answers, in the order of the sections."""
    return [
        Answer(each["question"], each["text"])
        for content in contents.values()
        for each in cast("list[dict[str, str]]", content["answers"])
    ]


def readme(contents: Mapping[str, Json]) -> str:
    """Return the README of a folder of results, in Markdown."""
    facts = {str(fact["name"]): str(fact["value"]) for fact in _rows(contents.get("device", {}), "Fact")}
    lines = [
        f"# {facts.get('name', 'An unknown device')}",
        "",
        *_PREFACE,
        "",
        *(f"* {name}: {facts[name]}" for name in _HEADER_FACTS if name in facts),
        *(
            f"* {content['section']}: {content['date']}, {content['seconds']} s, "
            f"mucudnn {content['version']}, commit {content['commit']}"
            for content in contents.values()
        ),
        "",
        *markdown(("question", "answer"), [(each.question, each.text) for each in answered(contents)]),
    ]
    for content in contents.values():
        lines += ["", f"## {content['about']}", "", *_section(content)]
    return "\n".join(lines) + "\n"


def _section(content: Json) -> Iterator[str]:
    if content["failure"] is not None:
        yield from ("```", str(content["failure"]), "```", "")
    for name, table in cast("dict[str, Json]", content["tables"]).items():
        rows = _rows(content, name)
        yield from (str(table["title"]), "")
        if len(rows) > _MOST_ROWS:
            yield f"{len(rows)} rows: `{name}` in `{content['section']}.json`."
        else:
            columns = tuple(rows[0])
            cells = [tuple(_cell(column, row[column]) for column in columns) for row in rows]
            yield from markdown(tuple(_heading(column) for column in columns), cells)
        yield ""


def _rows(content: Json, name: str) -> list[Json]:
    table = cast("dict[str, dict[str, list[Json]]]", content.get("tables", {})).get(name)
    return [] if table is None else table["rows"]


def _heading(column: str) -> str:
    """Return a field's name for a table; bytes are written with their unit in each cell."""
    if column in _NAMES:
        return _NAMES[column]
    words = column.removesuffix("_bytes").replace("_", " ")
    return re.sub(r"\bus$", "(µs)", re.sub(r"\bms$", "(ms)", words))


def _cell(column: str, value: object) -> str:
    """Return a value for a table; what is not there is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and column.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    if isinstance(value, dict):
        timing = Timing(**{**value, "spans_ns": tuple(value["spans_ns"])})
        return f"{timing}, n = {timing.samples}"
    return str(value)
