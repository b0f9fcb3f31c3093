"""Host cost of one attention call: the library's C entry, and the whole torch op.

    python scripts/bench_host.py [--no-gpu]

On a GPU the work is small and its queue short, so that the launch itself is what is timed: medians over
batches of calls, each batch followed by a synchronisation outside the clock. --no-gpu links the library's
host code with the tests' fake CUDA runtime, whose launch does nothing: everything but the launch, in CPU time
of the calling thread, on CPU tensors. Add the launch of a machine to predict its host cost.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import videoattn
from videoattn.kernels import abi, hopper, library, native

BATCHES, CALLS = 200, 50


def microseconds(call: Callable[[], object], on_gpu: bool) -> tuple[float, float]:
    """Median and least host time of one call over the batches."""
    clock = time.perf_counter_ns if on_gpu else time.thread_time_ns
    times = []
    for batch in range(BATCHES + 10):
        start = clock()
        for _ in range(CALLS):
            call()
        elapsed = clock() - start
        if on_gpu:
            torch.cuda.synchronize()
        if batch >= 10:
            times.append(elapsed / CALLS / 1e3)
    return statistics.median(times), min(times)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown CPU"


def use_fake_runtime() -> None:
    """Put the fake in the library's place, and tell the kernel module that a CPU tensor is on its device."""
    from tests.kernels.fake_cuda import FakeCuda

    fake = FakeCuda()
    fake.configure(record=False)
    fake.serve_cpu_tensors()
    native.num_sms = lambda device: 132
    native.library.load = lambda: fake.library
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    hopper.supports = lambda call: None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--no-gpu", action="store_true", help="time everything but the launch, on any machine"
    )
    on_gpu = not parser.parse_args().no_gpu
    if on_gpu and not torch.cuda.is_available():
        parser.error("there is no GPU here: --no-gpu times everything but the launch")
    if not on_gpu:
        use_fake_runtime()
    device = "cuda" if on_gpu else "cpu"
    q, k, v = (torch.randn(1, 128, 2, 128, device=device).to(torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
    call = native.fill_call(q, k, v, out, scale=0.1, arch=90, num_sms=132, stream=stream)
    entry = library.load().videoattn_attention
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    argument = ctypes.byref(call)
    scaled = torch.nn.functional.scaled_dot_product_attention
    rows: dict[str, Callable[[], object]] = {
        "C entry": lambda: entry(argument, text, abi.MESSAGE_BYTES),
        "kernel module's run()": lambda: native.run(
            q, k, v, scale=0.1, kv_lengths=None, return_lse=False, arch=90
        ),
        "torch op": lambda: videoattn.attention(q, k, v, kernel="hopper"),
    }
    if on_gpu:
        rows["torch SDPA"] = lambda: scaled(q, k, v)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    where = torch.cuda.get_device_name() if on_gpu else "no GPU, launches do nothing"
    print(f"{now}, {cpu_name()}, {where}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{'us a call':<24} median  least")
    with torch.inference_mode():
        for name, function in rows.items():
            middle, least = microseconds(function, on_gpu)
            print(f"{name:<24} {middle:6.2f} {least:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
