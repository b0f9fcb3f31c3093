"""The entry point: imports the command where Ctrl-C is told in one line as well."""

from __future__ import annotations

import signal
import sys
from typing import Any


def main() -> int:
    """Run the command and return its exit status."""
    pressed = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from videoattn import cli

        return cli.main()
    except (KeyboardInterrupt, ImportError) as error:
        # Packages that try an import of numpy's again, after Ctrl-C cut it short, end it in an ImportError.
        if isinstance(error, ImportError) and not pressed:
            raise
        sys.stderr.write("videoattn: interrupted, nothing unfinished is left\n")
        return 130
