"""The settings of threads and precision, one process each."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

REMOVED_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_")
"""Variables with these prefixes are taken out of a child's environment, so that defaults are defaults."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How many threads compute, and what OpenMP is told before they start.

    Attributes:
        name: for tables and options.
        threads: of `torch.set_num_threads`.
        variables: of the environment.
        fp32_precision: of `torch.backends.mkldnn.conv`.
    """

    name: str
    threads: int
    variables: tuple[tuple[str, str], ...] = ()
    fp32_precision: Literal["none", "tf32"] = "none"

    @property
    def text(self) -> str:
        """What a table's heading says: "2 threads, GOMP_SPINCOUNT=10000"."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        rounding = [] if self.fp32_precision == "none" else [f"fp32_precision={self.fp32_precision}"]
        return ", ".join([threads, *(f"{name}={value}" for name, value in self.variables), *rounding])


ONE = Setting("1-thread", 1)
TWO = Setting("2-threads", 2)
TWO_SPINNING_LESS = Setting("2-threads-spin", 2, (("GOMP_SPINCOUNT", "10000"),))
TWO_ROUNDING = Setting("2-threads-tf32", 2, fp32_precision="tf32")

SETTINGS: Mapping[str, Setting] = {each.name: each for each in (ONE, TWO, TWO_SPINNING_LESS, TWO_ROUNDING)}


def environment_of(setting: Setting, present: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: the present one, with the setting's variables and no other such."""
    kept = {name: value for name, value in present.items() if not name.startswith(REMOVED_PREFIXES)}
    return {**kept, **dict(setting.variables)}
