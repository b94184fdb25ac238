"""A child that answers as `footprint_child` does and loads no library: it starts at once, and weighs nothing.

What it is asked for names what it does: to "take" so many bytes, which it only says, in so many seconds; to
"tell" which process it is; or to "die" of a signal.
"""

import json
import os
import sys
import time
from collections.abc import Mapping


def main() -> None:
    """Answer requests from standard input until it ends."""
    _say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if request["limit_bytes"] is not None:
            _say({"capped": True})
        _say(_answer(request["function"], request["payload"]))


def _say(message: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _answer(asked: str, payload: Mapping[str, float]) -> Mapping[str, object]:
    if asked == "tell":
        return {"failed": f"ValueError: pid {os.getpid()}", "for_now": False, "spent": False}
    if asked == "die":
        os.kill(os.getpid(), int(payload["signal"]))
    if asked != "take":
        raise ValueError(asked)
    time.sleep(payload["seconds"])
    n_bytes = payload["bytes"]
    return {"n_bytes": n_bytes, "seen_bytes": n_bytes, "spent": False}


if __name__ == "__main__":
    main()
