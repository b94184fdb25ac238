"""Where records and comparisons are kept, so that nothing is measured twice."""

from mucudnn.store.base import Store
from mucudnn.store.memory import MemoryStore
from mucudnn.store.opening import (
    StoreOption,
    default_path,
    expanded,
    in_memory,
    open_store,
    opened,
    readable_store,
)
from mucudnn.store.sqlite import SqliteStore

__all__ = [
    "MemoryStore",
    "SqliteStore",
    "Store",
    "StoreOption",
    "default_path",
    "expanded",
    "in_memory",
    "open_store",
    "opened",
    "readable_store",
]
