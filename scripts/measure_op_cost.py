"""What one attention call costs the host on top of its kernel, with a kernel that does nothing.

Rows are batches of calls, interleaved in one process and timed in CPU time of the calling thread, so that
other work on the machine shows little; the table gives median and quartiles over the batches. For scale,
`F.scaled_dot_product_attention` computes its result from the same tiny tensors.

    python scripts/measure_op_cost.py
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import thread_time_ns
from typing import Any

import torch
import torch.nn.functional as F

import videoattn
from videoattn.attention import attend
from videoattn.dispatch import choose
from videoattn.kernels import sdpa

CALLS = 200


def cpu_name() -> str:
    """The CPU's model as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def microseconds(call: Callable[[], object], logged: bool) -> float:
    """CPU time of one call, from a batch; opening and closing the recording is outside."""
    with videoattn.record_timing() if logged else nullcontext() as recording:
        if recording is not None:
            recording.enter(clip="cost", stage="denoise", layers={"video_self": 4})
        began = thread_time_ns()
        for _ in range(CALLS):
            call()
        return (thread_time_ns() - began) / CALLS / 1e3


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, default=100)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 16, 2, 64, device=device, dtype=dtype) for _ in range(3))
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    result = torch.empty_like(q), None

    def nothing(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return result

    sdpa.run = nothing
    choose.cache_clear()
    op = torch.ops.videoattn.attention.default
    rows: dict[str, tuple[Callable[[], object], bool]] = {
        "attention()": (lambda: videoattn.attention(q, k, v, kernel="sdpa"), False),
        "attend(), the processors' door": (lambda: attend(q, k, v, kernel="sdpa", kind="video_self"), False),
        "  the same with the log on": (lambda: attend(q, k, v, kernel="sdpa", kind="video_self"), True),
        "the op through the dispatcher": (
            lambda: op(q, k, v, 0.1, None, None, False, "sdpa", "video_self"),
            False,
        ),
        "F.scaled_dot_product_attention": (lambda: F.scaled_dot_product_attention(query, key, value), False),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    with torch.inference_mode():
        for batch in range(arguments.batches + 3):
            for name, (call, logged) in rows.items():
                taken = microseconds(call, logged)
                if batch >= 3:
                    times[name].append(taken)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    print(f"{now}, {cpu_name()}, {where}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{'µs of CPU time a call':<32} median   quartiles")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:<32} {middle:>6.2f}   {low:.2f} {high:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
