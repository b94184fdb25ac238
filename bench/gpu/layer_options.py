"""The options of `make gpu-layers`, which its processes share, and where its files lie."""

import argparse
import math
from pathlib import Path

from bench.arguments import seconds
from mucudnn.choices import Policy

CASE_SECONDS = 300.0
"""That a case may take before it is taken to hang; the largest have a hundred slow candidates."""

_ABOUT = (
    "Compare layers on a card, PyTorch's own ways and ours within the same limits; go on where it stopped."
)


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    made = argparse.ArgumentParser(prog="bench.gpu.layer_run", description=_ABOUT)
    add = made.add_argument
    add("--device", type=int, default=0, help="the card's number (default: %(default)s)")
    add(
        "--limit",
        nargs="+",
        default=["8MiB", "64MiB", "512MiB"],
        help="of workspace (default: 8MiB 64MiB 512MiB)",
    )
    add(
        "--policy", choices=[str(each) for each in Policy], default=str(Policy.POWER_OF_TWO),
        help="which micro-batches are tried; each has files of its own (default: %(default)s)",
    )  # fmt: skip
    add("--settings", nargs="+", default=["*"], metavar="PATTERN", help="names, as in a shell (default: all)")
    add("--layers", nargs="+", default=["*"], metavar="PATTERN", help="names, as in a shell (default: all)")
    add(
        "--seconds", type=seconds, default=math.inf,
        help="after which no case is begun; the last one may take --case-seconds more (default: no end)",
    )  # fmt: skip
    add(
        "--case-seconds", type=float, default=CASE_SECONDS,
        help="after which a case is taken to hang, and its process ended; the times of its candidates are "
        "lost with it (default: %(default)s)",
    )  # fmt: skip
    add("--again", action="store_true", help="try anew what has failed before")
    add("--output", type=Path, help="folder (default: bench/results/ and the card's name)")
    add(
        "--recording", type=Path,
        help="folder of a store of profiles, as of make record, which would then take times of three samples "
        "and these rounds for its own (default: one under build/gpu-layers/)",
    )  # fmt: skip
    add(
        "--retell", type=Path, metavar="FOLDER",
        help="write the summaries of a folder of results anew, from its lines; measure nothing",
    )  # fmt: skip
    add("--untold", action="store_true", help="write no summary: `--retell` does, anywhere")
    add("--typed", help=argparse.SUPPRESS)  # what a process records as its command
    return made


def stem_of(policy: str) -> str:
    """Return how the files of a policy begin: "layers", or "layers-all"."""
    return "layers" if policy == Policy.POWER_OF_TWO else f"layers-{policy}"
