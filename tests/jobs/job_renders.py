"""Render functions for the tests: small, but real files through PyAV, frame by frame."""

import os
import signal
import time
from pathlib import Path

import av
import numpy as np

from videoattn.jobs import Context, Job, PermanentError, Result


def frames(seed: int, number: int, size: int = 64) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 255, (size, size, 3), dtype=np.uint8)
    return [np.roll(start, step, axis=1) for step in range(number)]


def write_mp4(path: Path, seed: int, number: int, between=lambda step: None) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"threads": "1"})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for step, frame in enumerate(frames(seed, number)):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            between(step + 1)
        container.mux(stream.encode())


def clip(job: Job, context: Context) -> Result:
    """Payload: seed, frames, delay (seconds per frame), gate (a file to wait for in the middle)."""
    payload = job.payload
    number = payload.get("frames", 4)

    def between(step: int) -> None:
        time.sleep(payload.get("delay", 0.0))
        context.progress("denoise", step, number)
        while step == number // 2 and "gate" in payload and not os.path.exists(payload["gate"]):
            context.check()
            time.sleep(0.01)

    context.progress("denoise", 0, number)
    write_mp4(context.work / "clip.mp4", payload["seed"], number, between)
    context.progress("encode", 0, 1)
    (context.work / "settings.txt").write_text(f"{payload['seed']}\n")
    files = {"clip": context.work / "clip.mp4", "settings": context.work / "settings.txt"}
    return Result(
        files=files, report={"seconds": {"denoise": 0.1}, "attempt": context.attempt, "pid": os.getpid()}
    )


def behave(job: Job, context: Context) -> Result:
    """Payload: `do` names what happens, then a clip is written."""
    what = job.payload.get("do", "clip")
    context.progress("denoise", 0, 100)
    if what == "fail":
        raise RuntimeError("the model\nexploded")
    if what == "fail once" and context.attempt == 1:
        raise RuntimeError("a passing trouble")
    if what == "never":
        raise PermanentError("this can never work")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if what == "exit":
        os._exit(3)
    if what == "hang":
        time.sleep(600)
    if what == "nothing":
        return Result(files={"clip": context.work / "absent.mp4"})
    if what == "elsewhere":
        return Result(files={"clip": "/etc/hostname"})
    if what == "chatter":
        print("this must not be taken for a message")
        os.write(1, b"nor this\n")
    if what == "swallow":
        for step in range(1000):
            try:
                context.progress("denoise", step, 1000)
                time.sleep(0.01)
            except Exception:
                pass
    if what == "model":
        loads = context.models.get(job.payload["model"], lambda: [time.monotonic_ns()])
        return clip_with(job, context, {"loaded": loads[0], "pid": os.getpid()})
    if what == "fill":
        (context.work / "clip.mp4").write_bytes(bytes(job.payload["bytes"]))
        return Result(files={"clip": context.work / "clip.mp4"})
    return clip(job, context)


def clip_with(job: Job, context: Context, report: dict) -> Result:
    write_mp4(context.work / "clip.mp4", job.payload["seed"], 2)
    return Result(files={"clip": context.work / "clip.mp4"}, report=report)
