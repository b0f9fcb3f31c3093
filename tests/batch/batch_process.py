"""The command in a process of its own, and the smallest jobs it can be given."""

import os
import subprocess
import sys
from pathlib import Path

CLI = Path(__file__).with_name("batch_cli.py")
SMALL = {"width": 64, "height": 64, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 1}


def start(*arguments, **options):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.Popen(
        [sys.executable, str(CLI), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        **options,
    )


def run(*arguments, code=0):
    process = start(*arguments)
    text, _ = process.communicate(timeout=600)
    assert process.returncode == code, text
    return text


def clips(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.mp4")}
