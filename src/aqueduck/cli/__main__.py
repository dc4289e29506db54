"""
The console script, also run as `python -m aqueduck.cli`.

Importing the command line takes a moment. An interrupt in that moment ends the program quietly, as it does
later, instead of with a traceback.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Load the command line and run it."""
    try:
        from aqueduck.cli import commands
    except KeyboardInterrupt:
        sys.exit(130)
    commands.main()


if __name__ == "__main__":
    main()
