"""Runs the command in forks of one process: what rendering imports takes seconds, and is imported here once.

A request is a line of JSON: arguments, working folder and the files for what is said; the answer is the exit
status.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys

from videoattn.command import main

PRELOADED = (
    "videoattn.batch.command",
    "videoattn.render.run",
    "videoattn.render.printing",
    "videoattn.render.progress",
    "transformers.models.t5.modeling_t5",
    "transformers.models.gemma3.modeling_gemma3",
)


def become(arguments: list[str], folder: str, out: str, err: str) -> None:
    """Run the command as this process would, had it been started for it, and end."""
    os.chdir(folder)
    for number, name in ((0, os.devnull), (1, out), (2, err)):
        file = os.open(name, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["videoattn", *arguments]
    code = main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking all the modules apart would copy most of the memory that the processes share.
    os._exit(code)


def serve() -> None:
    """Answer requests until nobody asks any more."""
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            become(**request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    import videoattn.cli  # noqa: F401

    for name in PRELOADED:
        __import__(name)
    serve()
