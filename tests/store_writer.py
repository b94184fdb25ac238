"""A process that adds records to a store one by one, and prints the number of each once it is kept.

python -m tests.store_writer PATH NAME COUNT
"""

import sys

from mucudnn.store import SqliteStore
from tests.examples import a_record, a_trial, an_environment


def main(path: str, name: str, count: str) -> None:
    with SqliteStore(path) as store:
        for index in range(int(count)):
            store.add_records(an_environment(), [a_record(a_trial(f"{name}:{index}"))])
            sys.stdout.write(f"{index}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
