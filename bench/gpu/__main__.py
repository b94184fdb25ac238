"""`python -m bench.gpu`."""

import sys

from bench.gpu.program import main

if __name__ == "__main__":
    sys.exit(main())
