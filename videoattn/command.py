"""The entry point: imports the command where Ctrl-C is told in one line as well."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command and return its exit status."""
    try:
        from videoattn import cli
    except KeyboardInterrupt:
        sys.stderr.write("videoattn: interrupted, nothing unfinished is left\n")
        return 130
    return cli.main()
