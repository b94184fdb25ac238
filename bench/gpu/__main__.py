"""`python -m bench.gpu`."""

import sys

from bench.gpu.hanging import heed_termination
from bench.gpu.watch import main

if __name__ == "__main__":
    heed_termination()
    sys.exit(main())
