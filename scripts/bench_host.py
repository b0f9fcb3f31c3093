"""Host cost of one attention call: the library's C entry, and the whole torch op.

    python scripts/bench_host.py [--no-gpu]

On a GPU the work is small and its queue short, so that the launch itself is what is timed: medians over
batches of calls, each batch followed by a synchronisation outside the clock. "empty launch" is the same
runtime call through ctypes, with the same grid, shared memory and parameter bytes, of a kernel that does
nothing: no C entry can cost less. nvcc compiles it on the spot.

--no-gpu links the library's host code with the tests' fake CUDA runtime, whose launch does nothing: all but
the launch, in CPU time of the calling thread, on CPU tensors. Add a machine's empty launch to predict its
host cost.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import videoattn
from videoattn.kernels import abi, hopper, library, native

BATCHES, CALLS = 200, 50
EMPTY = """
#include <cuda_runtime.h>
struct alignas(64) Map { char bytes[128]; };
struct Args { char bytes[ARGS_BYTES]; };
__global__ void empty(const __grid_constant__ Map, const __grid_constant__ Map, const __grid_constant__ Map,
                      const __grid_constant__ Map, const __grid_constant__ Args) {}
extern "C" int prepare(int smem) {
    return cudaFuncSetAttribute(empty, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
}
extern "C" int launch(void* stream, unsigned grid, unsigned block, unsigned cluster, size_t smem) {
    static Map maps[4];
    static Args args;
    void* params[] = {&maps[0], &maps[1], &maps[2], &maps[3], &args};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid), config.blockDim = dim3(block);
    config.dynamicSmemBytes = smem, config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster, 1, 1};
    config.attrs = &attribute, config.numAttrs = cluster > 1;
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(empty), params);
}
"""


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


def plan_of(call: abi.Call) -> abi.Plan:
    """What the library launches for the call."""
    plan = abi.Plan(struct_bytes=ctypes.sizeof(abi.Plan))
    if library.load().videoattn_plan(ctypes.byref(call), ctypes.byref(plan), None, 0) != abi.OK:
        raise RuntimeError("the call has no plan")
    return plan


def empty_kernel(plan: abi.Plan, capability: tuple[int, int], folder: Path) -> ctypes.CDLL:
    """A kernel with the plan's parameters and no work, compiled into `folder`."""
    compiler = library.find_compiler()
    source, made = folder / "empty.cu", folder / "empty.so"
    source.write_text(EMPTY)
    sizes = [plan.params[i].bytes for i in range(plan.num_params) if plan.params[i].tensor_map < 0]
    flags = ["-std=c++17", "-O3", f"-arch=sm_{capability[0]}{capability[1]}", f"-DARGS_BYTES={sum(sizes)}"]
    flags += [*library.LINK_FLAGS, "-Xcompiler=-fPIC"]
    command = [compiler.path, *compiler.flags, *flags, source, "-o", made]
    subprocess.run(command, check=True, timeout=300)
    made_library = ctypes.CDLL(str(made))
    made_library.launch.argtypes = (ctypes.c_void_p, *[ctypes.c_uint] * 3, ctypes.c_size_t)
    return made_library


def empty_launch(call: abi.Call) -> Callable[[], object]:
    """Launches a kernel without work as the library launches the call's."""
    plan = plan_of(call)
    with tempfile.TemporaryDirectory() as folder:
        empty = empty_kernel(plan, torch.cuda.get_device_capability(), Path(folder))
    arguments = (call.stream, plan.grid[0], plan.block[0], plan.cluster[0], plan.dynamic_smem)
    if empty.prepare(plan.dynamic_smem) != 0 or empty.launch(*arguments) != 0:
        raise RuntimeError("the empty kernel was refused")
    return lambda: empty.launch(*arguments)


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
    rows: dict[str, Callable[[], object]] = {"empty launch": empty_launch(call)} if on_gpu else {}
    rows |= {
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
