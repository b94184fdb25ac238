"""Files of stores, and what lies in them."""

import sqlite3
import subprocess
import sys
from pathlib import Path

from mucudnn.store import SqliteStore
from tests.examples import a_record, a_trial, an_environment

REPOSITORY = Path(__file__).parents[2]


def filled(path: Path, records: int = 1) -> Path:
    """Make a store of some records at `path`, with algorithms "cpu:0", "cpu:1" and so on."""
    with SqliteStore(path) as store:
        store.add_records(an_environment(), [a_record(a_trial(f"cpu:{index}")) for index in range(records)])
    return path


def execute(path: Path, *statements: str) -> None:
    """Change the file as another program would."""
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


def query(path: Path, question: str) -> tuple[object, ...]:
    database = sqlite3.connect(path)
    (row,) = database.execute(question)
    database.close()
    return tuple(row)


def a_writer(path: Path, name: str, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.store_writer", str(path), name, str(count)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
