"""The product kernel's plan, run on the simulator with torch tensors on the CPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from videoattn.kernels import abi, library, plan
from videoattn.kernels.native import fill_call
from videoattn.kernels.ptxas import compile_ptx
from videoattn.ptxsim import Device, Module, Report, Schedule, TensorMap

SOURCE = library.SOURCES / "blackwell" / "attention.cu"
ELEMENTS = {6: "f16", 9: "bf16"}
SWIZZLES = ("none", "32B", "64B", "128B")
PROMOTIONS = ("none", "64B", "128B", "256B")
LAUNCH_REGISTERS = 128


@lru_cache(maxsize=4)
def module(arch: int, source: str = "blackwell/attention.cu") -> Module:
    return Module.from_file(compile_ptx(library.SOURCES / source, f"sm_{arch}a"))


def planned(function, call: abi.Call) -> abi.Plan:
    """What a planner's function makes of a call; the merge's grid is 0 where the keys are not split."""
    made, text = abi.Plan(), ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    status = function(ctypes.byref(call), ctypes.byref(made), text, abi.MESSAGE_BYTES)
    assert status == abi.OK, text.value
    return made


def launch(device: Device, made: abi.Plan, code: Module, schedule: Schedule | None) -> Report:
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
        for m in made.maps[: made.num_maps]
    ]
    arguments = [
        maps[p.tensor_map] if p.tensor_map >= 0 else bytes(made.args[p.offset : p.offset + p.bytes])
        for p in made.params[: made.num_params]
    ]
    return device.launch(
        code.entry(made.kernel.decode()),
        grid=tuple(made.grid),
        block=tuple(made.block),
        cluster=tuple(made.cluster),
        dynamic_smem=made.dynamic_smem,
        args=arguments,
        schedule=schedule,
        registers=LAUNCH_REGISTERS,
    )


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
    splits: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, Report]:
    """Output, LSE and the simulator's report of one call of BSHD tensors; what is written starts as NaN.

    Where the keys are split, the merging kernel runs too; its findings join the report.
    """
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
        splits=splits,
        num_sms=grid,
    )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        getattr(call, name).data = address(tensor)
    if sums is not None:
        call.lse = address(sums)
    if kv_lengths is not None:
        call.kv_lengths = address(kv_lengths)

    planner = planner or plan.load()
    if count := planner.videoattn_workspace_bytes(ctypes.byref(call)):
        call.workspace = address(torch.full((count // 4,), float("nan")))
    report = launch(device, planned(planner.videoattn_plan, call), code or module(arch), schedule)
    merge = planned(planner.videoattn_plan_merge, call)
    if merge.grid[0]:
        merging = module(arch, source="common/merge.cu")
        report.findings += launch(device, merge, merging, schedule).findings
    return download(out), None if sums is None else download(sums), report
