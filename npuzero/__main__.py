"""``python -m npuzero``: the command line."""

import sys

from npuzero.cli import main

if __name__ == "__main__":
    sys.exit(main())
