"""Settings of which a test says only what it is about."""

from typing import Any

from mucudnn.tuning.options import Settings


def settings_of(**options: Any) -> Settings:
    """Return the settings that `options` make; whatever they leave out is as simple as can be."""
    others: dict[str, Any] = {
        "mode": "reuse", "policy": "undivided", "search": "heuristic", "max_error": None, "ops": "auto",
        "backend": "auto", "store": None, "again": False, "progress": False,
    }  # fmt: skip
    return Settings.of("1MiB", **{**others, **options})
