"""PyTorch's number of threads, for a while."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Have PyTorch compute on so many threads, and afterwards on as many as before."""
    import torch  # not for the tests of the pure part, which never load it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
