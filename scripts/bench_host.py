"""Host cost of one attention call: the library's C entry, and the whole torch op.

The GPU's work is small and its queue short, so that the launch itself is what is timed: medians over
batches of calls, each batch followed by a synchronisation outside the clock.

    python scripts/bench_host.py
"""

from __future__ import annotations

import ctypes
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import videoattn
from videoattn.kernels import abi, library, native

BATCHES, CALLS = 200, 50


def microseconds(call: Callable[[], object]) -> float:
    """Median host time of one call."""
    times = []
    for batch in range(BATCHES + 10):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        if batch >= 10:
            times.append(elapsed / CALLS * 1e6)
    return statistics.median(times)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown CPU"


def main() -> int:
    if not torch.cuda.is_available():
        print("bench_host needs an NVIDIA GPU", file=sys.stderr)
        return 1
    q, k, v = (torch.randn(1, 128, 2, 128, device="cuda").to(torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    stream = torch.cuda.current_stream().cuda_stream
    call = native.fill_call(q, k, v, out, scale=0.1, arch=90, num_sms=132, stream=stream)
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    entry = library.load().videoattn_attention
    argument = ctypes.byref(call)
    print(
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu_name(),
        torch.cuda.get_device_name(),
    )
    with torch.no_grad():
        rows = {
            "C entry": lambda: entry(argument, text, abi.MESSAGE_BYTES),
            "kernel module's run()": lambda: native.run(
                q, k, v, scale=0.1, kv_lengths=None, return_lse=False, arch=90
            ),
            "torch op": lambda: videoattn.attention(q, k, v, kernel="hopper"),
            "torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        }
        for name, function in rows.items():
            print(f"{name:<24} {microseconds(function):6.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
