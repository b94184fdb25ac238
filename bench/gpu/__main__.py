"""`python -m bench.gpu`."""

import sys

from bench.gpu.watch import main

if __name__ == "__main__":
    sys.exit(main())
