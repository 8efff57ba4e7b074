"""Runs the command ``conch`` as ``python -m conch``."""

import sys

from conch.cli import main

if __name__ == "__main__":
    sys.exit(main())
