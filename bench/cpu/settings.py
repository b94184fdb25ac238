"""The settings of threads, precision and limits, one process each."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from mucudnn.sizes import format_bytes

REMOVED_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_NUM_", "MKL_DOMAIN_", "MKL_DYNAMIC")
"""Variables with these prefixes are taken out of a child's environment, so that defaults are defaults.

All are about threads: which instructions MKL may use (MKL_ENABLE_INSTRUCTIONS) is the machine's description.
"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How many threads compute, and what OpenMP is told before they start.

    Attributes:
        name: for tables and options.
        threads: of `torch.set_num_threads`.
        variables: of the environment.
        fp32_precision: of `torch.backends.mkldnn.conv`.
        autocasts: whether networks run in `torch.autocast`, in bfloat16.
        limit_bytes: of each convolution's workspace within a network, where it is not the network's own.
    """

    name: str
    threads: int
    variables: tuple[tuple[str, str], ...] = ()
    fp32_precision: Literal["none", "tf32"] = "none"
    autocasts: bool = False
    limit_bytes: int | None = None

    @property
    def text(self) -> str:
        """What a table's heading says: "2 threads, GOMP_SPINCOUNT=10000"."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        rounding = [] if self.fp32_precision == "none" else [f"fp32_precision={self.fp32_precision}"]
        casting = ["autocast to bfloat16"] if self.autocasts else []
        limit = [] if self.limit_bytes is None else [f"within {format_bytes(self.limit_bytes)}"]
        variables = (f"{name}={value}" for name, value in self.variables)
        return ", ".join([threads, *variables, *rounding, *casting, *limit])


ONE = Setting("1-thread", 1)
TWO = Setting("2-threads", 2)
TWO_SPINNING_LESS = Setting("2-threads-spin", 2, (("GOMP_SPINCOUNT", "10000"),))
TWO_ROUNDING = Setting("2-threads-tf32", 2, fp32_precision="tf32")

TWO_CASTING = Setting("2-threads-bf16", 2, autocasts=True, limit_bytes=64 * 2**20)
"""PyTorch's own takes more workspace in 16 bits, mostly in the default layout: it turns images round."""

WITHIN_LITTLE = tuple(Setting(f"2-threads-{n}mib", 2, limit_bytes=n * 2**20) for n in (4, 8))
"""Where micro-batches are needed: within 16 MiB the algorithms in C hardly ever need any.

These are measured only if they are asked for: the hour of a run is for the others.
"""

SETTINGS: Mapping[str, Setting] = {
    each.name: each for each in (ONE, TWO, TWO_SPINNING_LESS, TWO_ROUNDING, TWO_CASTING, *WITHIN_LITTLE)
}

USUAL: tuple[str, ...] = tuple(name for name, each in SETTINGS.items() if each not in WITHIN_LITTLE)
"""Names of those in which all is measured that nobody asks for otherwise."""

OF_LAYERS: tuple[str, ...] = tuple(
    name for name, each in SETTINGS.items() if each.limit_bytes is None and not each.autocasts
)
"""Names of those in which single layers are measured, within limits of their own and without autocast."""


def environment_of(setting: Setting, present: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: the present one, with the setting's variables and no other such."""
    kept = {name: value for name, value in present.items() if not name.startswith(REMOVED_PREFIXES)}
    return {**kept, **dict(setting.variables)}
