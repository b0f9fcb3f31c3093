"""Run the simulator's conformance micro-kernels on an NVIDIA GPU (sm_90a) and store what they write.

    python scripts/record_conformance.py --out tests/ptxsim/golden/conformance.npz

Needs the CUDA driver only: it compiles the PTX. tests/ptxsim/test_conformance.py compares the simulator with
the file.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import queue
import struct
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "ptxsim")]

from conformance_cases import Case, Map, all_cases  # noqa: E402

_TYPES = {"u8": 0, "u16": 1, "u32": 2, "f16": 6, "f32": 7, "bf16": 9}
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}


class Driver:
    """The few calls of the CUDA driver this needs."""

    def __init__(self) -> None:
        self.cu = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name, self.version = name.value.decode(), version.value

    def call(self, function: str, *args) -> None:
        code = getattr(self.cu, function)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cu.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'?').decode()} ({code})")

    def upload(self, array: np.ndarray) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 16)))
        self.call(
            "cuMemcpyHtoD_v2", address, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes)
        )
        return address

    def tensor_map(self, m: Map, address: int) -> bytes:
        rank = len(m.dims)
        raw = (ctypes.c_uint8 * 192)()
        start = -ctypes.addressof(raw) % 64
        target = ctypes.c_void_p(ctypes.addressof(raw) + start)
        self.call(
            "cuTensorMapEncodeTiled", target, _TYPES[m.dtype], rank, ctypes.c_uint64(address),
            (ctypes.c_uint64 * rank)(*m.dims), (ctypes.c_uint64 * max(rank - 1, 1))(*(m.strides or (0,))),
            (ctypes.c_uint32 * rank)(*m.box), (ctypes.c_uint32 * rank)(*(m.element_strides or (1,) * rank)),
            0, _SWIZZLES[m.swizzle], 0, int(m.oob == "nan"),
        )  # fmt: skip
        return bytes(raw[start : start + 128])

    def run(self, case: Case) -> list[np.ndarray]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), case.ptx.encode() + b"\0")
        self.call("cuModuleGetFunction", ctypes.byref(function), module, case.kernel.encode())
        addresses = [self.upload(b) for b in case.buffers]
        values = []
        for arg in case.args:
            if isinstance(arg, Map):
                storage = (ctypes.c_uint8 * 256)()
                start = -ctypes.addressof(storage) % 64
                raw = self.tensor_map(arg, addresses[arg.buffer].value)
                ctypes.memmove(ctypes.addressof(storage) + start, raw, 128)
                values.append((storage, ctypes.c_void_p(ctypes.addressof(storage) + start)))
            else:
                raw = struct.pack("<Q", addresses[arg].value) if isinstance(arg, int) else struct.pack(
                    {"u32": "<I", "s32": "<i", "u64": "<Q"}[arg[0]], arg[1])  # fmt: skip
                storage = ctypes.create_string_buffer(raw, 8)
                values.append((storage, ctypes.cast(storage, ctypes.c_void_p)))
        pointers = (ctypes.c_void_p * len(values))(*[v[1] for v in values])
        self.call("cuLaunchKernel", function, 1, 1, 1, case.block, 1, 1, case.smem, None, pointers, None)
        self.call("cuCtxSynchronize")
        out = []
        for i in case.outputs:
            host = np.empty_like(case.buffers[i])
            self.call(
                "cuMemcpyDtoH_v2",
                host.ctypes.data_as(ctypes.c_void_p),
                addresses[i],
                ctypes.c_size_t(host.nbytes),
            )
            out.append(host)
        for a in addresses:
            self.call("cuMemFree_v2", a)
        self.call("cuModuleUnload", module)
        return out


def record(names: list[str], results) -> None:
    """Run cases one after another in this process; the first that loses the context ends it."""
    driver = Driver()
    results.put(("machine", f"{driver.name}, driver API {driver.version}"))
    cases = {c.name: c for c in all_cases()}
    for name in names:
        try:
            results.put((name, driver.run(cases[name])))
        except RuntimeError as error:
            results.put((name, str(error)))
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tests/ptxsim/golden/conformance.npz")
    parser.add_argument("--timeout", type=float, default=20, help="seconds a case may take")
    args = parser.parse_args()
    cases = {c.name: c for c in all_cases()}
    golden: dict[str, np.ndarray] = {}
    left, machine, failed = list(cases), "", 0
    spawn = multiprocessing.get_context("spawn")
    while left:
        results = spawn.Queue()
        worker = spawn.Process(target=record, args=(left, results))
        worker.start()
        while left:
            try:
                name, value = results.get(timeout=args.timeout)
            except queue.Empty:
                name, value = left[0], "no answer in time"
            if name == "machine":
                machine = value
                continue
            left.remove(name)
            if isinstance(value, str):  # a rejection by the hardware is a result too
                failed += 1
                golden[f"{name}/error"] = np.array(value)
                print(f"{name}: {value}", flush=True)
                break
            for i, out in zip(cases[name].outputs, value, strict=True):
                golden[f"{name}/{i}"] = out
        worker.kill()
        worker.join()
    stamp = f"{machine}, {time.strftime('%Y-%m-%d')}"
    golden["machine"] = np.array(stamp)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, allow_pickle=False, **golden)
    print(f"{len(cases)} cases on {stamp}; {failed} rejected; {args.out} has {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
