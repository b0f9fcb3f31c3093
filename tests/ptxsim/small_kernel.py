"""A kernel around a few instructions, for tests: registers, shared variables and parameters are there."""

from __future__ import annotations

import numpy as np

from videoattn.ptxsim import Device, Module, Report, Schedule, TensorMap

# %t thread, %w warp, %l lane; %lead thread 0; %w0 warp 0; %low lanes 0-15; %cell the thread's word of cells
KERNEL = """.version 8.7
.target {arch}
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 out)
{{
.shared .align 8 .b64 bar; .shared .align 8 .b64 other; .shared .align 4 .b32 slot;
.shared .align 1024 .b8 tile[4096]; .shared .align 16 .b8 cells[1024];
.reg .b32 %t, %w, %l, %cell, %tm, %lane, %a, %b, %c, %d, %x<16>; .reg .b64 %out, %o, %map, %q<4>;
.reg .pred %lead, %w0, %p, %q, %low;
ld.param.u64 %out, [out]; mov.b64 %map, map; cvta.param.u64 %map, %map; mov.u32 %t, %tid.x;
shr.u32 %w, %t, 5; and.b32 %l, %t, 31; setp.eq.u32 %lead, %t, 0; setp.eq.u32 %w0, %w, 0;
setp.lt.u32 %low, %l, 16;
mul.wide.u32 %o, %t, 4; add.u64 %o, %out, %o; mov.u32 %cell, cells; shl.b32 %a, %t, 2;
add.u32 %cell, %cell, %a;
shl.b32 %lane, %w, 21; and.b32 %lane, %lane, 0x600000;
{body}
END: ret;
}}
"""
INIT = """@%lead mbarrier.init.shared::cta.b64 [bar], {n}; @%lead fence.mbarrier_init.release.cluster;
bar.sync 0;"""
WAIT = "W{n}: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], {parity}; @!%p bra W{n};"
ARRIVE = "@%lead mbarrier.arrive.shared::cta.b64 _, [bar];"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%out], 32, [bar];"
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def launch(body: str, schedule: Schedule, *, arch: str = "sm_100a", block: int = 64, cluster: int = 1,
           registers: int | None = None, dtype: str = "u32",
           limit: int = 2000) -> tuple[Report, np.ndarray]:  # fmt: skip
    """(report, the 256 words of the buffer afterwards); before, they count up. The map's boxes are 8 x 4."""
    device = Device(arch)
    out = device.upload(np.arange(256, dtype={"u32": np.uint32, "f32": np.float32}[dtype]))
    tile_map = TensorMap(out, dtype=dtype, dims=(8, 32), strides=(32,), box=(8, 4))
    kernel = Module.from_ptx(KERNEL.format(arch=arch, body=body)).entry("k")
    report = device.launch(kernel, grid=cluster, cluster=cluster, block=block, args=[tile_map, out],
                           schedule=schedule, registers=registers, limit=limit)  # fmt: skip
    return report, out.download()
