"""What results depend on: machine, libraries, the allocator's settings, and the code that computes."""

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import mucudnn
from bench.cpu.settings import REMOVED_PREFIXES
from mucudnn.backends import backend_of
from mucudnn.profile import Environment

_PACKAGE = Path(mucudnn.__file__).parent
_BENCH = Path(__file__).parents[1]

_CODE = (
    "algorithms/**/*.c",
    "algorithms/**/*.py",
    "backends/*.py",
    "backends/cpu/*.py",
    "execution/*.py",
    "live/*.py",
    "timing.py",
)
"""Files of mucudnn that decide what runs and how it is timed: results of other ones are not mixed in."""

_STEP_CODE = (
    "convolutions/*.py",
    "examining/*.py",
    "functional.py",
    "patching/*.py",
    "profiling/*.py",
    "solvers/*.py",
    "tuner.py",
    "tuning/*.py",
)
"""Files of mucudnn that also decide what a patched network runs, in graphs too."""

_WAY_MODELS = ("cpu/way_cases.py", "cpu/ways.py")
"""Files of bench that define ways, and measure them."""

_STEP_MODELS = (
    *("networks.py", "depthwise_networks.py", "data.py", "steps.py"),
    *("cpu/rounds.py", "cpu/step_again.py", "cpu/step_models.py", "cpu/step_rounds.py", "cpu/steps.py"),
)
"""Files of bench that define the training steps."""


@dataclasses.dataclass(frozen=True)
class Ground:
    """What all processes of a run have in common.

    Attributes:
        environment: without what differs between thread settings.
        code: digest of the files that compute and time.
    """

    environment: Environment
    code: str

    @classmethod
    def here(cls) -> "Ground":
        """Return that of this machine and this checkout."""
        present = backend_of("cpu:").environment()
        policy = {name: fact for name, fact in present.policy.items() if not _is_of_threads(name)}
        return cls(dataclasses.replace(present, policy=policy), _digest(_content(_PACKAGE, _CODE)))

    @property
    def digest(self) -> str:
        """A name that is equal for equal grounds only, as far as digests are."""
        return _digest(f"{self.environment.key} {self.code}".encode())

    @property
    def slug(self) -> str:
        """The processor's name as a folder's: "cpu-amd-epyc-9r14"."""
        model = self.environment.device.get("model name") or platform.machine()
        words = re.sub(r"\((R|TM|tm)\)|\bCPU\b", " ", model).lower()
        return "cpu-" + re.sub(r"[^a-z0-9]+", "-", words).strip("-")

    def to_text(self) -> str:
        """Return JSON for people: what the digest stands for."""
        return json.dumps({"code": self.code, **self.environment.to_json()}, indent=1, sort_keys=True) + "\n"


def _is_of_threads(name: str) -> bool:
    return name in ("threads", "workers") or name.startswith(REMOVED_PREFIXES)


def step_code() -> str:
    """Return the digest of what, beside the ground, decides what is measured of training steps."""
    return _digest(_content(_PACKAGE, _STEP_CODE) + _content(_BENCH, _STEP_MODELS))


def way_code() -> str:
    """Return the digest of what, beside the ground, decides what is measured of networks in all ways."""
    return _digest(_content(_PACKAGE, _STEP_CODE) + _content(_BENCH, (*_STEP_MODELS, *_WAY_MODELS)))


def _content(root: Path, patterns: Sequence[str]) -> bytes:
    """Return the files below `root` that fit any of the patterns, one after the other."""
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    return b"".join(path.read_bytes() for path in paths)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
