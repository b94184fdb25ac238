"""`python -m bench.cpu`."""

import sys

from bench.cpu.program import main

if __name__ == "__main__":
    sys.exit(main())
