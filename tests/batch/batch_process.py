"""The command in a process of its own, and the smallest jobs it can be given."""

import os
import pty
import subprocess
import sys
import threading
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


def on_a_terminal(command, *, timeout, **options):
    """Run a command whose stderr is a terminal; returns what it wrote to stdout and on the terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child, **options)
    os.close(child)
    seen = []

    def read():
        while True:
            try:
                seen.append(os.read(parent, 4096))
            except OSError:
                return

    # A full terminal would stop the command.
    reader = threading.Thread(target=read)
    reader.start()
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
        reader.join()
        os.close(parent)
    return subprocess.CompletedProcess(command, process.returncode, out.decode(), b"".join(seen).decode())


def clips(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.mp4")}
