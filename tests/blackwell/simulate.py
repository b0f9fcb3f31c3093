"""The product kernel's plan, run on the simulator with torch tensors on the CPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from videoattn.kernels import library
from videoattn.kernels.native import fill_call
from videoattn.kernels.plan import plan
from videoattn.kernels.ptxas import compile_ptx
from videoattn.ptxsim import Device, Module, Report, Schedule, TensorMap

SOURCE = library.SOURCES / "blackwell" / "attention.cu"
ELEMENTS = {6: "f16", 9: "bf16"}
SWIZZLES = ("none", "32B", "64B", "128B")
PROMOTIONS = ("none", "64B", "128B", "256B")
LAUNCH_REGISTERS = 128


@lru_cache(maxsize=4)
def module(arch: int, defines: tuple[str, ...] = ()) -> Module:
    return Module.from_file(compile_ptx(SOURCE, f"sm_{arch}a", defines))


def simulate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    lse: bool = False,
    grid: int = 1,
    arch: int = 100,
    schedule: Schedule | None = None,
    code: Module | None = None,
    planner: ctypes.CDLL | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Report]:
    """Output, LSE and the simulator's report of one launch of BSHD tensors; output and LSE start as NaN."""
    device = Device(f"sm_{arch}a")
    buffers = {}

    def address(x: torch.Tensor) -> int:
        storage = x.untyped_storage()
        if storage.data_ptr() not in buffers:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            buffers[storage.data_ptr()] = device.upload(whole)
        return buffers[storage.data_ptr()].address + x.data_ptr() - storage.data_ptr()

    def download(x: torch.Tensor) -> torch.Tensor:
        raw = buffers[x.untyped_storage().data_ptr()].download()
        return raw.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    sums = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan")) if lse else None
    call = fill_call(
        q,
        k,
        v,
        out,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        kv_lengths=kv_lengths,
        lse=sums,
        arch=arch,
        grid=grid,
    )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        getattr(call, name).data = address(tensor)
    if sums is not None:
        call.lse = address(sums)
    if kv_lengths is not None:
        call.kv_lengths = address(kv_lengths)

    planned = plan(call, planner)
    maps = [
        TensorMap(
            m.address,
            dtype=ELEMENTS[m.dtype],
            dims=m.dims[: m.rank],
            strides=m.byte_strides[: m.rank - 1],
            box=m.box[: m.rank],
            swizzle=SWIZZLES[m.swizzle],
            l2_promotion=PROMOTIONS[m.l2_promotion],
        )
        for m in planned.maps[: planned.num_maps]
    ]
    arguments = [
        maps[p.tensor_map] if p.tensor_map >= 0 else bytes(planned.args[p.offset : p.offset + p.bytes])
        for p in planned.params[: planned.num_params]
    ]
    report = device.launch(
        (code or module(arch)).entry(planned.kernel.decode()),
        grid=tuple(planned.grid),
        block=tuple(planned.block),
        cluster=tuple(planned.cluster),
        dynamic_smem=planned.dynamic_smem,
        args=arguments,
        schedule=schedule,
        registers=LAUNCH_REGISTERS,
    )
    return download(out), None if sums is None else download(sums), report
