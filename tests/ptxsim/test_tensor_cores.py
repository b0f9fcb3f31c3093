"""tcgen05 through whole kernels: every load and store shape, and MMAs of every descriptor field."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from videoattn.ptxsim import Device, Module, Schedule, UnsupportedInstruction
from videoattn.ptxsim.ladder import encode

HEAD = ".version 8.8\n.target {arch}\n.address_size 64\n"
ALLOC = """setp.lt.u32 %w0, %t, 32; @!%w0 bra ALLOCATED;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [slot], 512;
tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned; ALLOCATED: {sync}
ld.shared.b32 %tm, [slot]; shl.b32 %lane, %t, 16; and.b32 %lane, %lane, 0x600000; add.u32 %win, %tm, %lane;"""
FREE = """tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
@%w0 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tm, 512;"""


def registers(prefix: str, n: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(n)) + "}"


# ---------------------------------------------------------------- loads and stores


def place(shape: str, t: int, i: int, split: int) -> tuple[int, int]:
    """(lane, column) of register i of thread t, from the tables of PTX ISA 9.7.16.2.3."""
    if shape == "32x32b":
        return t, i
    if shape == "16x64b":
        return t // 4 + 8 * (t % 2), 2 * i + t // 2 % 2
    if shape == "16x128b":
        return t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4
    if shape == "16x256b":
        return t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
    return t % 16, i + (split if t >= 16 else 0)


def move(instruction: str, columns: int, loads: int, arch: str = "sm_100a"):
    """Every cell of 128 x `columns` holds lane << 16 | column; then `instruction` runs in all four warps.

    Returns (the `loads` registers %r of each thread, the cells afterwards).
    """
    fills = "".join(f"add.u32 %x, %cell, {c}; tcgen05.st.sync.aligned.32x32b.x1.b32 [%win+{c}], {{%x}};\n"
                    for c in range(columns))  # fmt: skip
    keeps = "".join(f"st.global.b32 [%o+{512 * i}], %r{i};\n" for i in range(loads))
    reads = "".join(f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%x}}, [%win+{c}];\n"
                    "tcgen05.wait::ld.sync.aligned;\n"
                    f"st.global.b32 [%o+{512 * (loads + c)}], %x;\n" for c in range(columns))  # fmt: skip
    text = f"""{HEAD.format(arch=arch)}.visible .entry k(.param .u64 out)
{{
.shared .align 4 .b32 slot; .reg .b32 %t, %tm, %lane, %win, %cell, %x, %r<130>;
.reg .b64 %o; .reg .pred %w0;
mov.u32 %t, %tid.x; ld.param.u64 %o, [out]; mad.wide.u32 %o, %t, 4, %o; shl.b32 %cell, %t, 16;
{ALLOC.format(group=1, sync="bar.sync 0;")}
{fills} tcgen05.wait::st.sync.aligned;
{instruction} tcgen05.wait::ld.sync.aligned; tcgen05.wait::st.sync.aligned;
{keeps}{reads}{FREE.format(group=1, sync="bar.sync 0;")}
ret;
}}
"""
    device = Device(arch)
    out = device.upload(np.zeros((loads + columns, 128), np.uint32))
    report = device.launch(Module.from_ptx(text).entry("k"), block=128, args=[out], schedule=Schedule.late())
    assert not report.findings, str(report)
    got = out.download()
    return got[:loads], got[loads:].T


SHAPES = [("32x32b", 1, 0), ("32x32b", 8, 0), ("16x64b", 4, 0), ("16x128b", 2, 16), ("16x256b", 2, 16),
          ("16x32bx2", 4, 0)]  # fmt: skip
PER = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}


@pytest.mark.parametrize(("shape", "n", "lane"), SHAPES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("load", [True, False])
def test_shapes_move_what_the_tables_say(shape, n, lane, packed, load):
    if packed and shape == "16x32bx2":
        with pytest.raises(UnsupportedInstruction, match="split"):
            move("tcgen05.ld.sync.aligned.16x32bx2.x1.pack::16b.b32 {%r0}, [%win], 8;", 32, 1)
        return
    count, split = n * PER[shape], 8
    columns = 32
    offset = f", {split}" if shape == "16x32bx2" else ""
    if load:
        mode = ".pack::16b" if packed else ""
        code = (f"tcgen05.ld.sync.aligned.{shape}.x{n}{mode}.b32 {registers('r', count)}, "
                f"[%win+{lane << 16}]{offset};")  # fmt: skip
        got, cells = move(code, columns, count)
        before = np.arange(128)[:, None] << 16 | np.arange(columns)
        assert np.array_equal(cells, before)
    else:
        mode = ".unpack::16b" if packed else ""
        sets = "".join(f"mad.lo.u32 %r{i}, %t, 0x10001, {7919 * (i + 1)};" for i in range(count))
        code = (f"{sets} tcgen05.st.sync.aligned.{shape}.x{n}{mode}.b32 [%win+{lane << 16}]{offset}, "
                f"{registers('r', count)};")  # fmt: skip
        got, cells = move(code, columns, count)
    for warp in range(4):
        for i in range(count):
            for t in range(32):
                r, c = place(shape, t, i, split)
                at = 32 * warp + lane + r
                value = int(got[i, 32 * warp + t])
                if not packed:
                    assert value == int(cells[at, c])
                elif load:
                    assert value == 2 * c + 1 << 16 | 2 * c
                else:
                    assert cells[at, 2 * c : 2 * c + 2].tolist() == [value & 0xFFFF, value >> 16]


@pytest.mark.parametrize(
    ("kind", "typ", "expected"),
    [
        ("max", "u32", lambda lane: lane << 16 | 7),
        ("min", "s32", lambda lane: lane << 16),
        ("max", "f32", lambda lane: lane << 16 | 7),
    ],
)
def test_loads_with_a_reduction(kind, typ, expected):
    code = f"tcgen05.ld.red.sync.aligned.32x32b.x8.{kind}.{typ} {registers('r', 8)}, %r8, [%win];"
    got, cells = move(code, 8, 9, arch="sm_103a")
    assert np.array_equal(got[:8], cells.T)
    assert got[8].tolist() == [expected(lane) for lane in range(128)]
    with pytest.raises(UnsupportedInstruction, match="not available on sm_100a"):
        move(code, 8, 9)


def test_a_false_guard_leaves_a_whole_warp_out_of_a_load():
    code = """setp.lt.u32 %w0, %t, 32; mov.u32 %r0, 5;
@%w0 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%win+3]; @%w0 tcgen05.wait::ld.sync.aligned;"""
    got, _ = move(code, 4, 1)
    assert got[0].tolist() == [lane << 16 | 3 for lane in range(32)] + [5] * 96


# ---------------------------------------------------------------- MMA


@dataclass(frozen=True)
class Mma:
    """One D = ±A ±B + 2^-scale D of K = 16."""

    m: int = 128
    n: int = 32
    a: str = "128B"  # swizzle of A, or "tmem"
    b: str = "128B"
    a_mn: bool = False
    b_mn: bool = False
    types: str = "bf16 bf16"
    d: str = "f32"
    a_neg: bool = False
    b_neg: bool = False
    accumulate: bool = False
    scale: int = 0
    disabled: tuple[int, ...] = ()
    group: int = 1

    def __str__(self) -> str:
        return "-".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(Mma(), k)) or "plain"


SPAN = {"32B": 32, "64B": 64, "128B": 128}
CODE = {"none": 0, "128B": 2, "64B": 4, "32B": 6}
BITS = {"32B": 1, "64B": 3, "128B": 7}


def layout(mode: str, mn: bool, rows: int) -> tuple[int, int]:
    """(LBO, SBO) that place `rows` x 16 elements without overlap."""
    if mode == "none":
        return rows * 16, 128
    if not mn:
        return 16, 8 * SPAN[mode]
    blocks = max(rows // (SPAN[mode] // 2), 1)
    return 8 * SPAN[mode], 8 * SPAN[mode] * blocks


def image(matrix: np.ndarray, mode: str, mn: bool) -> np.ndarray:
    """Bytes of shared memory that hold a [rows, 16] operand (PTX ISA 9.7.16.4), at a multiple of 1024."""
    rows = len(matrix)
    lbo, sbo = layout(mode, mn, rows)
    out = np.zeros(16384, np.uint8).view(np.uint16)
    for r in range(rows):
        for k in range(16):
            if mode == "none":
                x = r % 8 * (2 if mn else 16) + r // 8 * sbo + k % 8 * (16 if mn else 2) + k // 8 * lbo
            elif mn:
                per = SPAN[mode] // 2
                x = r % per * 2 + r // per * lbo + k % 8 * SPAN[mode] + k // 8 * sbo
            else:
                x = r % 8 * SPAN[mode] + r // 8 * sbo + k * 2
            if mode != "none":
                x ^= (x >> 7 & BITS[mode]) << 4
            out[x // 2] = matrix[r, k]
    return out.view(np.uint8)


def descriptor(mode: str, mn: bool, rows: int) -> int:
    lbo, sbo = layout(mode, mn, rows)
    return lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | CODE[mode] << 61


def instruction_descriptor(c: Mma) -> int:
    types = [{"f16": 0, "bf16": 1}[t] for t in c.types.split()]
    flags = c.a_neg << 13 | c.b_neg << 14 | c.a_mn << 15 | c.b_mn << 16
    return (c.d == "f32") << 4 | types[0] << 7 | types[1] << 10 | flags | c.n >> 3 << 17 | c.m >> 4 << 24


CASES = [
    Mma(),
    *(Mma(a=s, b=s) for s in ("none", "32B", "64B")),
    *(Mma(a=s, b=s, a_mn=True, b_mn=True, n=64) for s in ("none", "32B", "64B", "128B")),
    Mma(a="none", b_mn=True, n=128),
    Mma(m=64, n=8),
    Mma(m=64, n=24, a="tmem"),
    Mma(a="tmem", types="f16 f16", n=256, b="32B"),
    Mma(types="f16 bf16"),
    Mma(types="f16 f16", d="f16", accumulate=True),
    Mma(a_neg=True, accumulate=True),
    Mma(b_neg=True, a="tmem"),
    Mma(a_neg=True, b_neg=True, accumulate=True, scale=3),
    Mma(disabled=(1, 0x80000000, 0xFFFF0000, 0), accumulate=True),
    Mma(group=2, m=256, n=64),
    Mma(group=2, m=256, n=64, a="tmem", b_mn=True),
    Mma(group=2, m=128, n=64, accumulate=True),
]


def kernel(c: Mma) -> str:
    """One thread (of the first CTA) issues the MMA; every thread stores its lane of D."""
    sync = "bar.sync 0;" if c.group == 1 else "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    columns = c.n // 2 if (c.group, c.m) == (2, 128) else c.n
    four = registers("r", 4)
    start = "".join(f"ld.global.v4.b32 {four}, [%d+{4 * i}]; "
                    f"tcgen05.st.sync.aligned.32x32b.x4.b32 [%win+{i}], {four};\n"
                    for i in range(0, columns, 4)) if c.accumulate else ""  # fmt: skip
    a_start = "".join(f"ld.global.v4.b32 {four}, [%a+{4 * i}]; "
                      f"tcgen05.st.sync.aligned.32x32b.x4.b32 [%win+{256 + i}], {four};\n"
                      for i in (0, 4)) if c.a == "tmem" else ""  # fmt: skip
    result = "".join(f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {registers('r', 4)}, [%win+{i}]; "
                     "tcgen05.wait::ld.sync.aligned;\n"
                     f"st.global.v4.b32 [%d+{4 * i}], {four};\n"
                     for i in range(0, columns, 4))  # fmt: skip
    a = "[%am]" if c.a == "tmem" else "%qa"
    lanes = "{" + ", ".join(map(str, c.disabled)) + "}, " if c.disabled else ""
    scale = f", {c.scale}" if c.scale else ""
    commit = f"tcgen05.commit.cta_group::{c.group}.mbarrier::arrive::one.shared::cluster"
    commit += ".b64 [bar];" if c.group == 1 else ".multicast::cluster.b64 [bar], 3;"
    return f"""{HEAD.format(arch="sm_100a")}
.visible .entry k(.param .u64 smem, .param .u64 tmem, .param .u64 out)
{{
.shared .align 1024 .b8 tile[32768]; .shared .align 8 .b64 bar; .shared .align 4 .b32 slot;
.reg .b32 %t, %tm, %lane, %win, %rank, %am, %r<4>, %i, %s, %row;
.reg .b64 %in, %a, %d, %p, %qa, %qb, %x;
.reg .pred %w0, %lead, %issue, %more, %acc;
mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %lead, %t, 0;
mad.lo.u32 %row, %rank, 128, %t;
ld.param.u64 %in, [smem]; ld.param.u64 %a, [tmem]; ld.param.u64 %d, [out];
mad.wide.u32 %in, %rank, 32768, %in; mad.wide.u32 %a, %row, 32, %a; mad.wide.u32 %d, %row, {4 * columns}, %d;
@%lead mbarrier.init.shared::cta.b64 [bar], 1; @%lead fence.mbarrier_init.release.cluster;
shl.b32 %i, %t, 4;
COPY: cvt.u64.u32 %p, %i; add.u64 %p, %p, %in; mov.u32 %s, tile; add.u32 %s, %s, %i;
ld.global.v4.b32 {registers("r", 4)}, [%p]; st.shared.v4.b32 [%s], {registers("r", 4)};
add.u32 %i, %i, 2048; setp.lt.u32 %more, %i, 32768; @%more bra COPY;
fence.proxy.async;
{sync}
{ALLOC.format(group=c.group, sync=sync)}
{start}{a_start} tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
setp.eq.and.u32 %issue, %rank, 0, %lead; @!%issue bra WAIT;
mov.u32 %s, tile; shr.u32 %s, %s, 4; and.b32 %s, %s, 0x3FFF; cvt.u64.u32 %x, %s; add.u32 %am, %tm, 256;
or.b64 %qa, %x, {descriptor(c.a, c.a_mn, c.m // c.group) if c.a != "tmem" else 0};
add.u64 %x, %x, 1024; or.b64 %qb, %x, {descriptor(c.b, c.b_mn, c.n // c.group)};
setp.eq.u32 %acc, {int(c.accumulate)}, 1;
tcgen05.mma.cta_group::{c.group}.kind::f16 [%tm], {a}, %qb, {instruction_descriptor(c)}, {lanes}%acc{scale};
{commit}
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %more, [bar], 0; @!%more bra WAIT;
tcgen05.fence::after_thread_sync;
{result}{FREE.format(group=c.group, sync=sync)}
ret;
}}
"""


def halves(x: np.ndarray, typ: str) -> np.ndarray:
    return encode(x, {"bf16": "bf16", "f16": "fp16"}[typ])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mma_computes_what_its_descriptors_say(case):
    c = case
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, (rows, 16)).astype(np.float32) for rows in (c.m, c.n))
    a_bits, b_bits = (halves(x, t) for x, t in zip((a, b), c.types.split(), strict=True))
    columns = c.n // 2 if (c.group, c.m) == (2, 128) else c.n
    images, packed = [], np.zeros((c.group, 128, 8), np.uint32)
    for part in range(c.group):
        mine = a_bits[part * c.m // c.group : (part + 1) * c.m // c.group]
        theirs = b_bits[part * c.n // c.group : (part + 1) * c.n // c.group]
        first = np.zeros(16384, np.uint8) if c.a == "tmem" else image(mine, c.a, c.a_mn)
        images.append(np.concatenate([first, image(theirs, c.b, c.b_mn)]))
        lanes = np.arange(len(mine)) if c.m != 64 else 32 * (np.arange(64) // 16) + np.arange(64) % 16
        packed[part, lanes] = np.ascontiguousarray(mine).view(np.uint32)
    start = rng.integers(-99, 100, (c.group, 128, columns)).astype(np.float32)
    f16 = start.astype(np.float16).view(np.uint16).astype(np.uint32)
    cells = start.view(np.uint32) if c.d == "f32" else f16
    device = Device("sm_100a")
    args = [device.upload(np.stack(images)), device.upload(packed), device.upload(cells)]
    report = device.launch(Module.from_ptx(kernel(c)).entry("k"), grid=c.group, cluster=c.group, block=128,
                           args=args, schedule=Schedule.late())  # fmt: skip
    if c.m == 64 and not c.accumulate:  # the other half of the lanes holds nothing
        assert {f.kind for f in report.findings} == {"uninitialised tmem"}
    else:
        assert not report.findings, str(report)
    got = args[2].download()
    got = got.view(np.float32) if c.d == "f32" else got.astype(np.uint16).view(np.float16).astype(np.float32)
    product = (-a if c.a_neg else a) @ (-b if c.b_neg else b).T
    for row in range(c.m):
        for column in range(c.n):
            if c.group == 1:
                where = (0, row if c.m == 128 else 32 * (row // 16) + row % 16, column)
            elif c.m == 256:
                where = (row // 128, row % 128, column)
            else:
                where = (row // 64, row % 64 + 64 * (column >= c.n // 2), column % (c.n // 2))
            want = product[row, column] + (start[where] * 2.0**-c.scale if c.accumulate else 0)
            lane = where[1]
            if c.disabled and c.disabled[lane // 32] >> lane % 32 & 1:
                want = start[where]
            assert got[where] == want, (row, column)


def test_a_lane_vector_for_a_pair_is_refused():
    """Which of the eight words are the second CTA's has not been checked against a second source."""
    text = kernel(Mma(group=2, m=256, n=64, disabled=(0,) * 8))
    device = Device("sm_100a")
    args = [device.upload(np.zeros(65536, np.uint8)) for _ in range(3)]
    with pytest.raises(UnsupportedInstruction, match="disable-output-lane"):
        device.launch(Module.from_ptx(text).entry("k"), grid=2, cluster=2, block=128, args=args)
