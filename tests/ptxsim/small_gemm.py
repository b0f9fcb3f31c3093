"""A small Blackwell kernel in PTX, clean as it stands; tests break one line of it at a time.

One CTA of 128 threads: D[128, 64] = A[128, 64] B[64, 64]^T in bf16, twice over (the second time onto the
first), so that operand slots and barriers are reused. Thread 0 of warp 0 loads and multiplies; every warp
then adds 1 to its rows in tensor memory through registers, and stores them.
"""

from __future__ import annotations

import numpy as np

from videoattn.ptxsim import Device, Module, Schedule, TensorMap
from videoattn.ptxsim.ladder import decode, encode

PTX = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry gemm(.param .align 64 .b8 a_map[128], .param .align 64 .b8 b_map[128], .param .u64 out)
{
.reg .pred %leader, %warp0, %done, %more, %acc; .reg .b32 %t, %w, %i, %par, %tm, %lane, %d<8>, %f<8>, %x;
.reg .b64 %a, %b, %out, %da, %db, %off; .reg .b16 %mask;
.shared .align 1024 .b8 tile_a[16384]; .shared .align 1024 .b8 tile_b[8192];
.shared .align 8 .b64 loaded; .shared .align 8 .b64 computed; .shared .align 4 .b32 slot;
mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; setp.eq.u32 %leader, %t, 0; setp.eq.u32 %warp0, %w, 0;
mov.b64 %a, a_map; cvta.param.u64 %a, %a; mov.b64 %b, b_map; cvta.param.u64 %b, %b; ld.param.u64 %out, [out];
@!%leader bra READY;
mbarrier.init.shared::cta.b64 [loaded], 1;
mbarrier.init.shared::cta.b64 [computed], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.warp.sync -1;
@!%warp0 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.u32 %tm, [slot];
mov.u32 %x, tile_a; and.b32 %x, %x, 262143; shr.u32 %x, %x, 4; cvt.u64.u32 %da, %x;
or.b64 %da, %da, 0x4000404000010000;
mov.u32 %x, tile_b; and.b32 %x, %x, 262143; shr.u32 %x, %x, 4; cvt.u64.u32 %db, %x;
or.b64 %db, %db, 0x4000404000010000;
mov.u32 %i, 0;
TILE:
and.b32 %par, %i, 1;
@!%leader bra ISSUED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [loaded], 24576;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [tile_a], [%a, {0, 0}], [loaded];
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [tile_b], [%b, {0, 0}], [loaded];
LOADING: mbarrier.try_wait.parity.shared::cta.b64 %done, [loaded], %par;
@!%done bra LOADING;
setp.ne.u32 %acc, %i, 0;
tcgen05.mma.cta_group::1.kind::f16 [%tm], %da, %db, 0x08100490, %acc;
setp.eq.u32 %acc, 0, 0;
add.u64 %off, %da, 2; add.u64 %db, %db, 2;
tcgen05.mma.cta_group::1.kind::f16 [%tm], %off, %db, 0x08100490, %acc;
add.u64 %off, %da, 4; add.u64 %db, %db, 2;
tcgen05.mma.cta_group::1.kind::f16 [%tm], %off, %db, 0x08100490, %acc;
add.u64 %off, %da, 6; add.u64 %db, %db, 2;
tcgen05.mma.cta_group::1.kind::f16 [%tm], %off, %db, 0x08100490, %acc;
sub.u64 %db, %db, 6;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [computed];
ISSUED:
bar.warp.sync -1;
COMPUTING: mbarrier.try_wait.parity.shared::cta.b64 %done, [computed], %par;
@!%done bra COMPUTING;
tcgen05.fence::after_thread_sync;
mov.u32 %d0, 0; shl.b32 %lane, %w, 21; add.u32 %lane, %lane, %tm;
COLUMNS:
add.u32 %x, %lane, %d0;
tcgen05.ld.sync.aligned.32x32b.x4.b32 {%f0, %f1, %f2, %f3}, [%x];
tcgen05.wait::ld.sync.aligned;
add.f32 %f0, %f0, 0f3F800000; add.f32 %f1, %f1, 0f3F800000;
add.f32 %f2, %f2, 0f3F800000; add.f32 %f3, %f3, 0f3F800000;
tcgen05.st.sync.aligned.32x32b.x4.b32 [%x], {%f0, %f1, %f2, %f3};
mad.lo.u32 %d1, %t, 64, %d0; mul.wide.u32 %off, %d1, 4; add.u64 %off, %off, %out;
st.global.v4.b32 [%off], {%f0, %f1, %f2, %f3};
add.u32 %d0, %d0, 4; setp.lt.u32 %more, %d0, 64;
@%more bra COLUMNS;
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
add.u32 %i, %i, 1; setp.lt.u32 %more, %i, 2;
@%more bra TILE;
@!%warp0 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 64;
END: ret;
}
"""


def operands() -> tuple[np.ndarray, np.ndarray]:
    """A [128, 64] and B [64, 64] of small integers."""
    rng = np.random.default_rng(5)
    return rng.integers(-4, 5, (128, 64)).astype(np.float32), rng.integers(-4, 5, (64, 64)).astype(np.float32)


def run(ptx: str = PTX, schedule: Schedule | None = None, limit: int = 20_000):
    """(report, output [128, 64])"""
    a, b = operands()
    device = Device("sm_100a")
    buffers = [device.upload(encode(x, "bf16"), n) for x, n in ((a, "a"), (b, "b"))]
    out = device.upload(np.full((128, 64), np.nan, np.float32), "out")
    maps = [TensorMap(x, dtype="bf16", dims=(64, r), strides=(128,), box=(64, r), swizzle="128B")
            for x, r in zip(buffers, (128, 64), strict=True)]  # fmt: skip
    kernel = Module.from_ptx(ptx).entry("gemm")
    report = device.launch(kernel, block=128, args=[*maps, out], schedule=schedule, limit=limit)
    return report, out.download()


def expected() -> np.ndarray:
    """What the kernel writes."""
    a, b = operands()
    return 2 * (decode(encode(a, "bf16"), "bf16") @ decode(encode(b, "bf16"), "bf16").T) + 2
