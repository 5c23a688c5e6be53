"""`python -m understudy` is the command `understudy`, for trees that were not installed."""

from __future__ import annotations

import sys

from understudy.cli import main

if __name__ == "__main__":
    sys.exit(main())
