"""What is known already when a model is tuned again."""

from pathlib import Path

import mucudnn
from tests.models import a_batch, a_chain
from tests.threads import threads

LIMIT = "1MiB"


def a_known_store(folder: Path) -> Path:
    """Return a store that knows all of `a_chain` on `a_batch` in training, under `LIMIT`, on this machine."""
    path = folder / "profiles.sqlite3"
    with threads(1):
        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=path, progress=False)
    return path
