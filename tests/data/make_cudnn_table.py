"""Makes cudnn_9_19_h200.json.gz: what cuDNN 9.19 offers an H200 for ten layers, by its own lists.

    python -m tests.data.make_cudnn_table

It needs nvidia-cudnn-cu13==9.19.0.56 and no GPU. Another version of cuDNN gives another table.
"""

import gzip

from mucudnn.backends.cudnn.devices import device_described
from mucudnn.backends.cudnn.library import load_library
from tests.cudnn.table import PATH, all_problems, case_of, line_of


def main() -> None:
    library = load_library()
    device = device_described("h200").descriptor(library)
    lines = [line_of(problem, case_of(library, device, problem)) for problem in all_problems()]
    text = "\n".join(lines) + "\n"
    PATH.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
