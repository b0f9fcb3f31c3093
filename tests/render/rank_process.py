"""The command in a process of its own whose imports are done already, as torchrun would start it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import diffusers
import transformers

import videoattn.render.run

# What a rank uses, imported once by the server that the ranks fork from.
PRELOADED = (diffusers.LTXPipeline, transformers.T5EncoderModel, videoattn.render.run.Renderer)


def command(arguments: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run the command; its streams go to files named by the rank, and its status is the process's."""
    from videoattn.cli import main

    os.chdir(folder)
    os.environ.update(environment)
    rank = environment["RANK"]
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}{rank}", os.O_CREAT | os.O_WRONLY), number)
    sys.exit(main(arguments))
