"""The web page: `python app.py --port 7860 --output DIR`, the same as `videoattn ui`."""

import sys

from cyclopts import App

from videoattn.cli import guarded
from videoattn.version import __version__
from videoattn.web.command import ui

if __name__ == "__main__":
    app = App(name="app.py", version=__version__, help_format="plaintext", suppress_keyboard_interrupt=False)
    app.default(ui)
    sys.exit(guarded(app, sys.argv[1:], "app.py"))
