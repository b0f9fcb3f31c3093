"""The verb `batch` as a command of its own, the way the command line mounts it."""

import sys

from cyclopts import App

from videoattn.batch.command import batch

app = App(name="batch", default_command=batch)

if __name__ == "__main__":
    sys.exit(app(sys.argv[1:], result_action="return_value"))
