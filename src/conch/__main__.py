"""``python -m conch`` is the command ``conch``."""

import sys

from conch.cli import main

if __name__ == "__main__":
    sys.exit(main())
