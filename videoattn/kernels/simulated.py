"""The library's kernels in the simulator: the launcher's own plan, the compiled PTX, no GPU."""

from __future__ import annotations

from functools import lru_cache

import torch

from videoattn.kernels import abi, library, native, plan
from videoattn.kernels.ptxas import compile_ptx
from videoattn.ptxsim import Buffer, Device, Module, Report, Schedule, TensorMap

TARGETS = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a"}
SOURCES = {"hopper": "hopper/attention.cu", "blackwell": "blackwell/attention.cu", "merge": "common/merge.cu"}
MAP_DTYPES = {6: "f16", 9: "bf16"}
SWIZZLES = {0: "none", 1: "32B", 2: "64B", 3: "128B"}
PROMOTIONS = {0: "none", 1: "64B", 2: "128B", 3: "256B"}


@lru_cache(maxsize=8)
def module(source: str, target: str) -> Module:
    """The PTX of one source of `csrc` for a target such as sm_90a.  Raises BuildError."""
    return Module.from_file(compile_ptx(library.SOURCES / source, target))


class Memory:
    """Uploads torch tensors with their whole storage: strides and padding are as the kernel will see them."""

    def __init__(self, device: Device):
        self.device = device
        self.buffers: dict[int, tuple[Buffer, torch.Tensor]] = {}

    def address(self, x: torch.Tensor) -> int:
        """Where the tensor's first element lies on the simulated device."""
        start = x.untyped_storage().data_ptr()
        if start not in self.buffers:
            count = x.untyped_storage().nbytes() // x.element_size()
            whole = x.as_strided((count,), (1,), 0)
            self.buffers[start] = (self.device.upload(whole, f"tensor {len(self.buffers)}"), whole)
        return self.buffers[start][0].address + int(x.storage_offset()) * x.element_size()

    def download(self) -> None:
        """Copy every buffer back into the tensors it came from."""
        for buffer, whole in self.buffers.values():
            whole.copy_(buffer.download())


def launch(device: Device, made: abi.Plan, target: str, schedule: Schedule | None, **options) -> Report:
    """Run what a plan describes."""
    name = made.kernel.decode()
    kernel = module(SOURCES[name.split("_")[1]], target).entry(name)
    maps = [
        TensorMap(
            tensor_map.address,
            dtype=MAP_DTYPES[tensor_map.dtype],
            dims=tensor_map.dims[: tensor_map.rank],
            strides=tensor_map.byte_strides[: tensor_map.rank - 1],
            box=tensor_map.box[: tensor_map.rank],
            swizzle=SWIZZLES[tensor_map.swizzle],
            l2_promotion=PROMOTIONS[tensor_map.l2_promotion],
            oob="nan" if tensor_map.oob_fill else "zero",
        )
        for tensor_map in made.maps[: made.num_maps]
    ]
    args = [
        maps[param.tensor_map]
        if param.tensor_map >= 0
        else bytes(made.args[param.offset : param.offset + param.bytes])
        for param in made.params[: made.num_params]
    ]
    return device.launch(
        kernel,
        grid=tuple(made.grid),
        block=tuple(made.block),
        cluster=tuple(made.cluster),
        dynamic_smem=made.dynamic_smem,
        args=args,
        schedule=schedule,
        **options,
    )


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    arch: int,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = True,
    out: torch.Tensor | None = None,
    grid: int = 0,
    splits: int = 1,
    rows: int = 0,
    gate: torch.Tensor | None = None,
    schedule: Schedule | None = None,
    **options,
) -> tuple[torch.Tensor, torch.Tensor | None, list[Report]]:
    """Attention of BSHD CPU tensors by the kernel for `arch` in the simulator.

    Returns the output, the LSE and a report for each launch. Output and LSE are NaN before it. `grid` limits
    the CTAs, so that small problems give each many tiles; `options` go to `Device.launch`. Raises
    PlanRefused, BuildError and the simulator's errors.
    """
    target = TARGETS[arch]
    device = Device(target)
    memory = Memory(device)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype) if out is None else out
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan) if return_lse else None
    call = native.fill_call(
        q, k, v, out, scale=scale, arch=arch, grid=grid, splits=splits, rows=rows, num_sms=device.sm_count
    )
    for tensor, field in ((q, call.q), (k, call.k), (v, call.v), (out, call.out)):
        field.data = memory.address(tensor)
    if lse is not None:
        call.lse = memory.address(lse)
    if kv_lengths is not None:
        call.kv_lengths = memory.address(kv_lengths)
    if gate is not None:
        call.gate = abi.Gate(memory.address(gate), *gate.stride()[:2])
    count = plan.workspace_bytes(call)
    if count:
        call.workspace = memory.address(torch.full((count // 4,), torch.nan))
    reports = [launch(device, plan.plan(call), target, schedule, **options)]
    if (merge := plan.plan_merge(call)) is not None:
        reports.append(launch(device, merge, target, schedule))
    memory.download()
    return out, lse, reports
