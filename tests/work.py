"""Work of jobs whose memory is weighed."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass
class Work:
    """What `run` calls, and the bytes of what that returns."""

    work: Callable[[], object]
    result_bytes: int = 0

    def run(self) -> object:
        return self.work()
