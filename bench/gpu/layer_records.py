"""Rounds of layers on a card as a store keeps them: in a replay they answer, where they have all it asks for.

`make gpu-layers` adds those of its layers to its store. To another one, which holds the profiles of the same
layers in the same environment, `python -m bench.gpu.layer_records FOLDER STORE` adds those of the lines that
a folder of results has. A replay asks for fewer rivals than competed here (`mucudnn.tuning.confirming`), so
what runs there may be another one.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.cpu.lines import Measured, Recording, read_packed_too
from mucudnn.errors import StoreError
from mucudnn.profile import Comparison, Environment, Measurement
from mucudnn.store import SqliteStore


def comparisons(line: Measured) -> Iterator[Comparison]:
    """Yield the rounds that prove what was chosen, then those in which all rivals competed.

    Which of them a replay takes is said there: `mucudnn.profiling.replay.Replay.compare`.
    """
    seen = {rival.key: rival.seen_bytes for rival in line.rivals if rival.seen_bytes is not None}
    workspaces = {line.own: line.own_bytes, **seen}
    for rounds in (line.proving, line.deciding):
        # Lines hold spans, not whether the pairs were settled when sampling stopped: that is unknown.
        times = {
            key: Measurement(spans, rounds.calls, converged=False, others=rounds.others or 0.0)
            for key, spans in rounds.spans_ns.items()
        }
        known = {key: workspaces[key] for key in times if key in workspaces}
        yield Comparison(line.problem, times, known)


def add(recording: Recording, store: SqliteStore) -> int:
    """Add the rounds of lines to a store that knows their layers; return how many sets of rounds are new.

    Layers are left out that the store has no profile of: nothing would ask for their rounds.

    Raises:
        StoreError: it holds no environment of the lines, or cannot be used.
    """
    known = {environment.key for environment in store.environments()}
    environments = {
        name: started.environment
        for name, started in recording.started.items()
        if started.environment.key in known
    }
    if not environments:
        raise StoreError(
            f"{store.path} must hold profiles of the environment of the lines, but has none of "
            f"{', '.join(recording.started) or 'any setting'}."
        )
    lines = [line for line in recording.measured.values() if line.case.setting in environments]
    return sum(_add(line, environments[line.case.setting], store) for line in lines)


def _add(line: Measured, environment: Environment, store: SqliteStore) -> int:
    if not any(record.trial.whole for record in store.records_of(environment, line.problem)):
        return 0  # what is known is of parts of a larger mini-batch, or nothing
    new = [
        each for each in comparisons(line) if store.comparison(environment, line.problem, each.times) is None
    ]
    store.add_comparisons(environment, new)
    return len(new)


def main(arguments: Sequence[str] | None = None) -> int:
    """Add what a folder has; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.gpu.layer_records", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of results, which has layers.jsonl")
    parser.add_argument("store", type=Path, metavar="STORE", help="file with profiles, not packed")
    options = parser.parse_args(arguments)
    try:
        recording = Recording.of(read_packed_too(options.folder / "layers.jsonl"))
        if not recording.measured:
            raise StoreError(f"{options.folder} must have lines of layers, but has none.")
        if not options.store.exists():
            raise StoreError(f"{options.store} must hold profiles, but there is no such file.")
        with SqliteStore(options.store) as store:
            print(f"Sets of rounds that were added to {options.store}: {add(recording, store)}.")
    except (StoreError, OSError, EOFError) as error:
        print(f"bench.gpu.layer_records: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
