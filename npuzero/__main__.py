"""Run the command line: ``python -m npuzero``."""

import sys

from npuzero.cli import main

if __name__ == "__main__":
    sys.exit(main())
