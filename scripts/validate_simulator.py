"""Stock FlashAttention-4 on the simulator: its own sm_100 and sm_90 forward kernels must give the right
attention.

    python scripts/validate_simulator.py --variants sm_100-1cta,sm_100-2cta,sm_90 --schedules early,late

Compiles the kernels without a GPU (needs flash-attn-4, nvidia-cutlass-dsl[cu13], quack-kernels,
apache-tvm-ffi, torch-c-dlpack-ext, einops, triton), or takes PTX from an earlier run with --ptx FOLDER.
Prints one table: error against fp32 attention, the accuracy rule's bound, findings by severity and kind.
"""

from __future__ import annotations

import argparse
import math
import os
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

VARIANTS = {"sm_100-1cta": ("sm_100a", "1"), "sm_100-2cta": ("sm_100a", "0"), "sm_90": ("sm_90a", "1")}

COMPILE = """
import cutlass.utils, cutlass.utils.hardware_info
class NoGpu:
    def __init__(self, *a, **k): pass
    def get_device_multiprocessor_count(self): return 148
    def get_max_active_clusters(self, n=1, *a, **k): return 148 // n
cutlass.utils.hardware_info.HardwareInfo = cutlass.utils.HardwareInfo = NoGpu
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from flash_attn.cute.interface import _flash_attn_fwd
with FakeTensorMode():
    q, k, v = (torch.empty(1, 1024, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    _flash_attn_fwd(q, k, v, softmax_scale=128**-0.5, causal=False)
"""


def compile_variant(name: str, folder: Path) -> Path:
    """PTX of one variant in `folder`; raises SystemExit with the compiler's last line."""
    target = folder / f"{name}.ptx"
    if target.exists():
        return target
    arch, one_cta = VARIANTS[name]
    with tempfile.TemporaryDirectory() as dump:
        env = os.environ | {
            "CUTE_DSL_ARCH": arch, "FLASH_ATTENTION_ARCH": arch, "FLASH_ATTENTION_NUM_SMS": "148",
            "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": dump, "FA_DISABLE_2CTA": one_cta,
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
        found = list(Path(dump).glob("*.ptx"))
        if not found:
            raise SystemExit(f"{name} did not compile: {done.stderr.strip().splitlines()[-1:]}")
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(found[0].read_text())
    return target


def fast_divmod(divisor: int) -> bytes:
    """CUTLASS's FastDivmodDivisorV2: divisor, multiplier, two shifts."""
    bits = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << bits) - divisor)) // divisor + 1
    return struct.pack("<IIBBxx", divisor, multiplier, min(bits, 1), max(bits - 1, 0))


def run(name: str, ptx: Path, schedule, batch: int, heads: int, q_len: int, kv_len: int):
    """(report, max error, bound) of one launch, BSHD."""
    from videoattn.ptxsim import Device, Module, TensorMap
    from videoattn.ptxsim.ladder import decode, encode, inputs, reference

    module = Module.from_file(ptx)
    kernel = next(iter(module.entries.values()))
    q, k, v = inputs(batch * heads, q_len, kv_len, "bf16")

    def bshd(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(encode(x, "bf16").reshape(batch, heads, -1, 128).transpose(0, 2, 1, 3))

    device = Device(VARIANTS[name][0])
    buffers = [device.upload(bshd(x), n) for x, n in ((q, "q"), (k, "k"), (v, "v"))]
    out = device.upload(np.full((batch, q_len, heads, 128), 0x7FFF, np.uint16), "out")
    pair = name.endswith("2cta")

    def tensor_map(buffer, length: int, rows: int) -> TensorMap:
        return TensorMap(
            buffer,
            dtype="bf16",
            dims=(128, length, heads, batch),
            strides=(heads * 256, 256, length * heads * 256),
            box=(64, rows, 1, 1),
            swizzle="128B",
        )

    lengths = (q_len, kv_len, kv_len, q_len)
    args = [struct.pack("<4i", n, 128, heads, batch) for n in lengths]
    rows = (128, 64 if pair else 128, 128, 128)
    args += [tensor_map(b, n, r) for b, n, r in zip((*buffers, out), lengths, rows, strict=True)]
    args.append(128**-0.5 * math.log2(math.e))
    rest: list = [bytes(p.size) if p.type == "b8" else 1 for p in kernel.entry.params[9:]]
    if name == "sm_90":
        grid, block, cluster = (-(-q_len // 128), heads, batch), 384, (1, 1, 1)
    else:
        blocks = -(-q_len // (512 if pair else 256))
        total = blocks * heads * batch
        grid, block = (min(148, total * (2 if pair else 1)), 1, 1), 512
        cluster = (2, 1, 1) if pair else (1, 1, 1)
        rest[2], rest[4], rest[6] = fast_divmod(blocks), fast_divmod(heads), total
    report = device.launch(kernel, grid=grid, block=block, cluster=cluster, dynamic_smem=232448,
                           args=[*args, *rest], schedule=schedule)  # fmt: skip
    got = decode(out.download(), "bf16").transpose(0, 2, 1, 3).reshape(batch * heads, q_len, 128)
    ref, bound = reference(q, k, v, "bf16")
    error = float(np.abs(got - ref).max()) if np.isfinite(got).all() else math.inf
    return report, error, bound


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--schedules", default="early,late,random:1")
    parser.add_argument("--shape", default="1x2x512x384", help="batch x heads x q_len x kv_len")
    parser.add_argument("--ptx", type=Path, default=Path("build/fa4"), help="folder to keep the PTX in")
    args = parser.parse_args()
    batch, heads, q_len, kv_len = map(int, args.shape.split("x"))
    from videoattn.ptxsim import Schedule

    failed = False
    print(f"{'variant':12} {'schedule':10} {'max error':>9} {'bound':>9} {'errors':>6}  strict findings")
    for name in args.variants.split(","):
        ptx = compile_variant(name, args.ptx)
        for schedule in args.schedules.split(","):
            report, error, bound = run(name, ptx, Schedule.named(schedule), batch, heads, q_len, kv_len)
            strict = Counter(f.kind for f in report.findings if f.severity == "strict")
            failed |= bool(report.errors) or error > bound
            kinds = ", ".join(f"{n} × {k}" for k, n in strict.items()) or "none"
            print(
                f"{name:12} {schedule:10} {error:9.5f} {bound:9.5f} {len(report.errors):6}  {kinds}",
                flush=True,
            )
            for finding in report.errors[:5]:
                print("   ", finding)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
