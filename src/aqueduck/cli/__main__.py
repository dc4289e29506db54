"""
The console script, also as `python -m aqueduck.cli`.

Loading the command line takes a moment, in which an interrupt would be a traceback: here it is the end, as later.
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
