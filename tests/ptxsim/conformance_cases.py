"""Micro-kernels for everything Hopper shares with the simulator, with their inputs.

scripts/record_conformance.py runs them on an NVIDIA GPU and stores what they write; test_conformance.py runs
them on the simulator and compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

HEADER = ".version 8.3\n.target sm_90a\n.address_size 64\n"


@dataclass
class Map:
    """A tensor map over argument `buffer`."""

    buffer: int
    dtype: str
    dims: tuple
    strides: tuple
    box: tuple
    swizzle: str = "none"
    oob: str = "zero"
    element_strides: tuple | None = None


@dataclass
class Case:
    """A kernel, its launch and its buffers.

    `buffers` are uploaded in order and downloaded afterwards where `outputs` says so. `args` name buffers
    (int), tensor maps (Map) or integers (("u32", v), ("u64", v)). `ulp`: tolerance in units of the last place
    of f32 outputs, None for bit equality; `absolute`: a difference that passes whatever its ulp.
    """

    name: str
    ptx: str
    buffers: list[np.ndarray]
    outputs: list[int]
    args: list
    block: int = 32
    smem: int = 0
    ulp: int | None = None
    absolute: float = 0.0
    kernel: str = field(default="k")


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


# ---------------------------------------------------------------- scalar instructions


SPECIALS = np.array(
    [
        0,
        0x80000000,
        1,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x80800000,
        0x3F800000,
        0xBF800000,
        0x3F800001,
        0x3F7FFFFF,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x4B000000,
        0x4B000001,
        0x4EFFFFFF,
        0x4F000000,
        0xCF000000,
        0xCF000001,
        0x4F800000,
        0x33800000,
        0x34000000,
        0x3F000000,
        0x3FC00000,
        0x40200000,
        0xC0200000,
        0x42FE0000,
        0xC2FC0000,
        0xC3160000,
    ],
    np.uint32,
)


def float_inputs(name: str, n: int = 1024) -> list[np.ndarray]:
    """Three arrays of f32 bit patterns: special values against each other, near ties, then random ones."""
    rng = _rng(name)
    a, b, c = (rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    near = (rng.integers(120, 134, (3, n)) << 23 | rng.integers(0, 2**23, (3, n))).astype(np.uint32)
    near |= (rng.integers(0, 2, (3, n)) << 31).astype(np.uint32)
    half = n // 2
    a[half:], b[half:], c[half:] = near[0, half:], near[1, half:], near[2, half:]
    k = len(SPECIALS)
    a[:k], b[:k], c[:k] = SPECIALS, np.roll(SPECIALS, 7), np.roll(SPECIALS, 13)
    a[k : 2 * k], b[k : 2 * k], c[k : 2 * k] = (
        SPECIALS,
        SPECIALS ^ np.uint32(0x80000000),
        np.roll(SPECIALS, 3),
    )
    # products whose f64 sum with c lies on an f32 tie
    a[half : half + 64] = 0x3F800001 + np.arange(64)
    b[half : half + 64] = 0x3F800001 + 3 * np.arange(64)
    c[half : half + 64] = 0x33000000 + np.arange(64)
    return [a, b, c]


def int_inputs(name: str, n: int = 1024) -> list[np.ndarray]:
    """Three arrays of 32-bit patterns with corner values first."""
    rng = _rng(name)
    out = [rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32) for _ in range(3)]
    corners = np.array(
        [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 255, 65535], np.uint32
    )
    k = len(corners)
    grid = np.array(np.meshgrid(corners, corners)).reshape(2, -1)
    out[0][: k * k], out[1][: k * k] = grid
    out[2][: k * k] = np.resize(corners, k * k)
    out[1][512:] &= 0x3F
    return out


def scalar_case(
    name: str, lines: list[tuple[str, str]], inputs: list[np.ndarray], ulp: int | None = None
) -> Case:
    """Each line is (result register class f/r/h/d, body with {d} and %a0..%a2 as .b32); the result is stored
    as u32 (d: u64).
    """
    n = len(inputs[0])
    body = []
    for i, (kind, text) in enumerate(lines):
        reg = {"r": "b32", "h": "b16", "d": "b64", "p": "pred"}[kind]
        code = text.format(d="d")
        store = {
            "r": "st.global.u32 [o], d;",
            "d": "st.global.u64 [o], d;",
            "h": "cvt.u32.u16 w, d; st.global.u32 [o], w;",
            "p": "selp.u32 w, 1, 0, d; st.global.u32 [o], w;",
        }[kind]
        body.append(
            f"{{ .reg .{reg} d; .reg .b32 w; .reg .pred p; .reg .b16 h0, h1; .reg .b64 q, o;\n"
            f"add.u64 o, %out, {8 * n * i};\n{code}\n{store} }}"
        )
    ptx = f"""{HEADER}
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 po)
{{
.reg .b32 %t, %a0, %a1, %a2; .reg .b64 %pa, %pb, %pc, %out, %off, %off8;
mov.u32 %t, %tid.x;
mul.wide.u32 %off, %t, 4; mul.wide.u32 %off8, %t, 8;
ld.param.u64 %pa, [pa]; ld.param.u64 %pb, [pb]; ld.param.u64 %pc, [pc]; ld.param.u64 %out, [po];
add.u64 %pa, %pa, %off; add.u64 %pb, %pb, %off; add.u64 %pc, %pc, %off; add.u64 %out, %out, %off8;
ld.global.u32 %a0, [%pa]; ld.global.u32 %a1, [%pb]; ld.global.u32 %a2, [%pc];
{chr(10).join(body)}
ret;
}}
"""
    out = np.zeros(n * len(lines), np.uint64)
    return Case(name, ptx, [*inputs, out], [3], [0, 1, 2, 3], block=n, ulp=ulp)


def scalar_cases() -> list[Case]:
    cases = []
    rounds = [(f"{op}.{r}{ftz}.f32", n) for op, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3))
              for r in ("rn", "rz", "rm", "rp") for ftz in ("", ".ftz")]  # fmt: skip
    lines = [("r", f"{op} {{d}}, {', '.join(f'%a{i}' for i in range(n))};") for op, n in rounds]
    cases.append(scalar_case("float_rounding", lines, float_inputs("float_rounding")))
    ops = ["min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32", "min.ftz.f32", "max.ftz.f32", "div.rn.f32"]
    lines = [("r", f"{op} {{d}}, %a0, %a1;") for op in ops]
    lines += [("r", f"{op} {{d}}, %a0;") for op in ("abs.f32", "neg.f32", "sqrt.rn.f32", "rcp.rn.f32")]
    for cmp in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        lines.append(("p", f"setp.{cmp}.f32 {{d}}, %a0, %a1;"))
    cases.append(scalar_case("float_misc", lines, float_inputs("float_misc")))
    lines = [
        ("r", f"cvt.{r}.{t}.f32 {{d}}, %a0;")
        for r in ("rni", "rzi", "rmi", "rpi")
        for t in ("s32", "u32", "f32")
    ]
    lines += [("d", f"cvt.{r}.{t}.f32 {{d}}, %a0;") for r in ("rni", "rzi") for t in ("s64", "u64")]
    lines += [("h", f"cvt.{r}.bf16.f32 {{d}}, %a0;") for r in ("rn", "rz")]
    lines += [("h", "cvt.rn.f16.f32 {d}, %a0;")]
    lines += [("r", f"cvt.rn.{t}.f32 {{d}}, %a0, %a1;") for t in ("bf16x2", "f16x2", "relu.bf16x2")]
    lines += [("r", f"cvt.{r}.f32.{t} {{d}}, %a0;") for r in ("rn", "rz", "rm", "rp") for t in ("s32", "u32")]
    lines += [("r", "cvt.sat.f32.f32 {d}, %a0;"), ("r", "cvt.ftz.f32.f32 {d}, %a0;")]
    lines += [
        ("r", "cvt.u16.u32 h0, %a0; cvt.f32.f16 {d}, h0;"),
        ("r", "cvt.u16.u32 h0, %a0; cvt.f32.bf16 {d}, h0;"),
    ]
    cases.append(scalar_case("conversions", lines, float_inputs("conversions")))
    lines = [
        ("r", f"{op}.x2 {{d}}, %a0, %a1;".replace("f16.x2", "f16x2").replace("bf16.x2", "bf16x2"))
        for op in ("add.rn.f16", "mul.rn.f16", "add.rn.bf16", "mul.rn.bf16", "min.f16", "max.f16")
    ]
    lines += [("r", f"fma.rn.{t} {{d}}, %a0, %a1, %a2;") for t in ("f16x2", "bf16x2")]
    cases.append(scalar_case("packed_half", lines, float_inputs("packed_half")))
    two = [
        "add.s32",
        "sub.s32",
        "mul.lo.s32",
        "mul.hi.s32",
        "mul.hi.u32",
        "and.b32",
        "or.b32",
        "xor.b32",
        "shl.b32",
        "shr.u32",
        "shr.s32",
        "min.s32",
        "max.s32",
        "min.u32",
        "max.u32",
    ]
    lines = [("r", f"{op} {{d}}, %a0, %a1;") for op in two]
    lines += [("d", "mul.wide.s32 {d}, %a0, %a1;"), ("d", "mul.wide.u32 {d}, %a0, %a1;")]
    lines += [
        ("r", f"{op} {{d}}, %a0;")
        for op in ("popc.b32", "clz.b32", "brev.b32", "bfind.u32", "not.b32", "abs.s32")
    ]
    three = [
        "mad.lo.s32",
        "shf.l.wrap.b32",
        "shf.r.wrap.b32",
        "shf.l.clamp.b32",
        "shf.r.clamp.b32",
        "prmt.b32",
    ]
    lines += [("r", f"{op} {{d}}, %a0, %a2, %a1;") for op in three]
    lines += [("r", f"lop3.b32 {{d}}, %a0, %a1, %a2, {t};") for t in (0xE8, 0x96, 0x1B)]
    lines += [("r", "bfe.u32 {d}, %a0, %a1, 7;"), ("r", "bfi.b32 {d}, %a0, %a2, %a1, 5;")]
    lines += [
        ("r", f"max.u32 w, %a1, 1; {op} {{d}}, %a0, w;")
        for op in ("div.u32", "rem.u32", "div.s32", "rem.s32")
    ]
    for cmp in ("eq", "lt", "ge"):
        lines += [("p", f"setp.{cmp}.s32 {{d}}, %a0, %a1;"), ("p", f"setp.{cmp}.u32 {{d}}, %a0, %a1;")]
    lines += [
        ("d", "mov.b64 q, {{%a0, %a1}}; mul.hi.u64 {d}, q, q;"),
        ("d", "mov.b64 q, {{%a0, %a1}}; shr.s64 {d}, q, %a2;"),
    ]
    cases.append(scalar_case("integers", lines, int_inputs("integers")))
    approx = ["ex2.approx.f32", "ex2.approx.ftz.f32", "rcp.approx.f32", "rcp.approx.ftz.f32",
              "rsqrt.approx.f32", "rsqrt.approx.ftz.f32", "sqrt.approx.f32"]  # fmt: skip
    rng = _rng("approx")
    x = np.concatenate([SPECIALS, rng.uniform(-150, 130, 480).astype(np.float32).view(np.uint32),
                        rng.uniform(0.01, 100, 512).astype(np.float32).view(np.uint32)])  # fmt: skip
    cases.append(
        scalar_case("approximations", [("r", f"{op} {{d}}, %a0;") for op in approx], [x, x, x], ulp=4)
    )
    logs = scalar_case(
        "logarithm", [("r", f"lg2.approx{f}.f32 {{d}}, %a0;") for f in ("", ".ftz")], [x] * 3, ulp=4
    )
    logs.absolute = 2.0**-21.5  # near 1, where the ISA states an absolute error
    cases.append(logs)
    shuffles = [
        ("r", f"shfl.sync.{m}.b32 {{d}}, %a0, {b}, {c}, -1;")
        for m, b, c in (
            ("up", 3, 0),
            ("down", 5, 31),
            ("bfly", 7, 31),
            ("idx", 9, 31),
            ("up", 2, 0x1800),
            ("down", 3, 0x181F),
            ("bfly", 9, 0x101F),
            ("idx", 3, 0x181F),
        )
    ]
    shuffles += [("p", "setp.gt.s32 p, %a0, 0; vote.sync.any.pred {d}, p, -1;"),
                 ("p", "setp.ne.s32 p, %a0, 0; vote.sync.all.pred {d}, p, -1;"),
                 ("r", "setp.gt.s32 p, %a0, 0; vote.sync.ballot.b32 {d}, p, -1;"),
                 ("r", "redux.sync.add.s32 {d}, %a0, -1;"), ("r", "redux.sync.max.s32 {d}, %a0, -1;"),
                 ("r", "redux.sync.min.u32 {d}, %a0, -1;"), ("p", "elect.sync _|{d}, -1;"),
                 ("r", "and.b32 w, %a0, 3; match.any.sync.b32 {d}, w, -1;")]  # fmt: skip
    cases.append(scalar_case("warp_exchange", shuffles, int_inputs("warp_exchange")))
    return cases


# ---------------------------------------------------------------- TMA


def _tma_kernel(rank: int, smem_bytes: int, tx: int, store: bool) -> str:
    coords = ", ".join(f"%c{i}" for i in range(rank))
    load = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    put = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    params = ", ".join(f".param .s32 c{i}" for i in range(rank))
    loads = "\n".join(f"ld.param.s32 %c{i}, [c{i}];" for i in range(rank))
    if store:
        fill = """ld.global.u32 %v, [%p]; st.shared.u32 [%s], %v;"""
        action = f"""fence.proxy.async.shared::cta; bar.sync 0;
@!%leader bra DONE;
{put} [%map, {{{coords}}}], [tile];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
DONE:"""
        tail = ""
    else:
        fill = "mov.u32 %v, 0xABABABAB; st.shared.u32 [%s], %v;"
        action = f"""fence.proxy.async.shared::cta; bar.sync 0;
@!%leader bra WAIT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {tx};
{load} [tile], [%map, {{{coords}}}], [bar];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %done, [bar], 0;
@!%done bra WAIT;"""
        tail = f"""mov.u32 %i, %t; 
OUT: shl.b32 %s, %i, 2; cvt.u64.u32 %o, %s; mov.u32 %v, tile; add.u32 %s, %s, %v; ld.shared.u32 %v, [%s];
add.u64 %p, %buf, %o; st.global.u32 [%p], %v; add.u32 %i, %i, 128; setp.lt.u32 %more, %i, {smem_bytes // 4};
@%more bra OUT;"""
    return f"""{HEADER}
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 buf, {params})
{{
.reg .pred %leader, %done, %more; .reg .b32 %t, %i, %s, %v; .reg .s32 %c<5>; .reg .b64 %map, %buf, %p, %o;
.shared .align 1024 .b8 tile[{smem_bytes}]; .shared .align 8 .b64 bar;
mov.b64 %map, map; cvta.param.u64 %map, %map; ld.param.u64 %buf, [buf];
{loads}
mov.u32 %t, %tid.x; setp.eq.u32 %leader, %t, 0;
@%leader mbarrier.init.shared::cta.b64 [bar], 1;
@%leader fence.mbarrier_init.release.cluster;
mov.u32 %i, %t;
FILL: shl.b32 %s, %i, 2; cvt.u64.u32 %o, %s; add.u64 %p, %buf, %o; mov.u32 %v, tile; add.u32 %s, %s, %v;
{fill}
add.u32 %i, %i, 128; setp.lt.u32 %more, %i, {smem_bytes // 4};
@%more bra FILL;
{action}
bar.sync 0;
{tail}
ret;
}}
"""


_SPAN = {"none": 32, "32B": 32, "64B": 64, "128B": 128}
_NUMPY = {"bf16": np.uint16, "f16": np.uint16, "f32": np.uint32, "u8": np.uint8, "u32": np.uint32}


def _tma_case(name, dtype, dims, box, swizzle, at, oob="zero", element_strides=None, store=False) -> Case:
    size = np.dtype(_NUMPY[dtype]).itemsize
    rng = _rng(name)
    strides, pitch = [], dims[0] * size
    for d in dims[1:]:
        pitch = -(-pitch // 16) * 16
        strides.append(pitch)
        pitch *= d
    data = rng.integers(0, 256, -(-pitch // 16) * 16, dtype=np.uint8)
    counts = [-(-b // s) for b, s in zip(box, element_strides or (1,) * len(box), strict=True)]
    tx = int(np.prod(counts)) * size
    nbytes = -(-tx // 1024) * 1024
    other = rng.integers(0, 256, nbytes, dtype=np.uint8) if store else np.zeros(nbytes, np.uint8)
    m = Map(0, dtype, dims, tuple(strides), box, swizzle, oob, element_strides)
    ptx = _tma_kernel(len(dims), nbytes, tx, store)
    args = [m, 1, *[("s32", c) for c in at]]
    return Case(name, ptx, [data, other], [0] if store else [1], args, block=128)


def tma_cases() -> list[Case]:
    cases = []

    def add(*args, **options):
        cases.append(_tma_case(*args, **options))

    for swizzle, span in _SPAN.items():
        for dtype in ("bf16", "f32", "u8"):
            e = span // np.dtype(_NUMPY[dtype]).itemsize
            add(f"tma_{swizzle}_{dtype}", dtype, (3 * e, 40), (e, 24), swizzle, (e, 5))
        e = span // 2
        add(f"tma_{swizzle}_low", "bf16", (2 * e, 20), (e, 16), swizzle, (-8, -3))
        add(f"tma_{swizzle}_high", "bf16", (2 * e, 20), (e, 16), swizzle, (2 * e - 8, 11))
        add(f"tma_{swizzle}_outside", "bf16", (2 * e, 20), (e, 8), swizzle, (4 * e, 3))
        add(f"tma_{swizzle}_nan", "bf16", (2 * e, 20), (e, 16), swizzle, (e + 8, 13), oob="nan")
        add(f"tma_store_{swizzle}", "bf16", (2 * e, 20), (e, 16), swizzle, (e - 8, 9), store=True)
        add(f"tma_store_{swizzle}_low", "bf16", (2 * e, 20), (e, 16), swizzle, (-8, -3), store=True)
        if span > 16:
            add(f"tma_{swizzle}_narrow", "bf16", (64, 20), (span // 4, 16), swizzle, (8, 2))
    add("tma_nan_f32", "f32", (32, 20), (16, 8), "64B", (24, 16), oob="nan")
    add("tma_nan_f16", "f16", (32, 20), (32, 8), "64B", (8, 16), oob="nan")
    add("tma_1d", "f32", (100,), (64,), "none", (50,))
    add("tma_3d", "bf16", (64, 6, 5), (64, 4, 3), "128B", (0, 3, -1))
    add("tma_4d", "bf16", (32, 5, 4, 3), (32, 3, 2, 2), "64B", (0, 1, 3, 2))
    add("tma_5d", "bf16", (16, 4, 3, 3, 2), (16, 3, 2, 2, 2), "32B", (8, -1, 1, 2, 0))
    add("tma_strided", "bf16", (64, 40), (64, 16), "128B", (0, 3), element_strides=(1, 2))
    add("tma_odd_rows", "bf16", (64, 40), (64, 7), "128B", (0, 3))
    # inner coordinates that are no multiple of 16 bytes, and rank 1 with and without
    add("tma_1d_aligned", "f32", (100,), (64,), "none", (48,))
    for n in (1, 4, -3):
        add(f"tma_1d_at_{n}", "bf16", (200,), (64,), "none", (n,))
    add("tma_inner_f32", "f32", (100, 8), (64, 4), "none", (50, 2))
    for swizzle, span in _SPAN.items():
        e = span // 2
        for n in (1, 4, -3):
            add(f"tma_inner_{swizzle}_{n}", "bf16", (2 * e, 20), (e, 16), swizzle, (n, 3))
        add(f"tma_inner_store_{swizzle}", "bf16", (2 * e, 20), (e, 16), swizzle, (4, 3), store=True)
    return cases


# ---------------------------------------------------------------- mbarrier


def mbarrier_cases() -> list[Case]:
    cases = []
    for seed in range(6):
        rng = _rng(f"mbarrier{seed}")
        count = int(rng.integers(1, 5))
        body = [f"mbarrier.init.shared::cta.b64 [bar], {count};"]
        pending, expected, tx, phase, slot = count, count, 0, 0, 0
        for _ in range(40):
            action = rng.choice(
                ["arrive", "expect", "complete", "arrive_expect", "drop"], p=[0.4, 0.15, 0.25, 0.15, 0.05]
            )
            n = int(rng.integers(1, 200))
            if action == "arrive" and pending > 0:
                k = int(rng.integers(1, pending + 1))
                body.append(f"mbarrier.arrive.shared::cta.b64 %s, [bar], {k};")
                pending -= k
            elif action == "expect":
                body.append(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {n};")
                tx += n
            elif action == "complete" and (tx > 0 or pending > 0):
                n = min(n, tx) if tx > 0 and pending == 0 else n
                if rng.random() < 0.6 and tx > 0:
                    n = tx
                body.append(f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], {n};")
                tx -= n
            elif action == "arrive_expect" and pending > 0:
                body.append(f"mbarrier.arrive.expect_tx.shared::cta.b64 %s, [bar], {n};")
                tx += n
                pending -= 1
            elif action == "drop" and pending > 0 and expected > 1:
                body.append("mbarrier.arrive_drop.shared::cta.b64 %s, [bar];")
                pending -= 1
                expected -= 1
            else:
                continue
            if pending == 0 and tx == 0:
                phase, pending = phase + 1, expected
            for parity in (0, 1):
                body.append(
                    f"mbarrier.test_wait.parity.shared::cta.b64 %p, [bar], {parity}; selp.u32 %r, 1, 0, %p; "
                    f"st.global.u32 [%out+{4 * slot}], %r;"
                )
                slot += 1
        ptx = f"""{HEADER}
.visible .entry k(.param .u64 out)
{{
.reg .pred %p, %lead; .reg .b32 %r, %t; .reg .b64 %s, %out; .shared .align 8 .b64 bar;
mov.u32 %t, %tid.x; setp.ne.u32 %lead, %t, 0; @%lead bra END; ld.param.u64 %out, [out];
{chr(10).join(body)}
END: ret;
}}
"""
        cases.append(Case(f"mbarrier_{seed}", ptx, [np.full(slot, 7, np.uint32)], [0], [0]))
    return cases


# ---------------------------------------------------------------- wgmma, mma, ldmatrix


def _wgmma_kernel(
    n: int, smem_bytes: int, a_regs: bool, typ: str, trans_a: int, trans_b: int, steps: int
) -> str:
    regs = n // 2
    d = ", ".join(f"%f{i}" for i in range(regs))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{typ}.{typ}"
    body = []
    for s in range(steps):
        a = "{%x0, %x1, %x2, %x3}" if a_regs else "%da"
        tail = f"1, 1, {trans_b}" if a_regs else f"1, 1, {trans_a}, {trans_b}"
        body.append(f"setp.ne.u32 %acc, {s}, 0;\n{name} {{{d}}}, {a}, %db, %acc, {tail};")
        body.append("add.u64 %da, %da, %sa; add.u64 %db, %db, %sb;")
    stores = "\n".join(f"st.global.f32 [%o+{4 * 128 * i}], %f{i};" for i in range(regs))
    zeros = "\n".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(regs))
    frags = "\n".join(f"ld.global.u32 %x{i}, [%fa+{4 * 128 * i}];" for i in range(4)) if a_regs else ""
    return f"""{HEADER}
.visible .entry k(.param .u64 img, .param .u64 afr, .param .u64 out, .param .u64 da, .param .u64 db,
                  .param .u64 sa,
                  .param .u64 sb)
{{
.reg .pred %more, %acc; .reg .b32 %t, %i, %s, %v, %x<4>; .reg .f32 %f<{regs}>;
.reg .b64 %img, %p, %o, %da, %db, %sa, %sb, %off, %fa, %base;
.shared .align 1024 .b8 tile[{smem_bytes}];
ld.param.u64 %img, [img]; ld.param.u64 %fa, [afr]; ld.param.u64 %o, [out];
ld.param.u64 %da, [da]; ld.param.u64 %db, [db]; ld.param.u64 %sa, [sa]; ld.param.u64 %sb, [sb];
mov.u32 %t, %tid.x; mul.wide.u32 %off, %t, 4; add.u64 %o, %o, %off; add.u64 %fa, %fa, %off;
mov.u32 %s, tile; shr.u32 %s, %s, 4; cvt.u64.u32 %base, %s; add.u64 %da, %da, %base; add.u64 %db, %db, %base;
mov.u32 %i, %t;
FILL: shl.b32 %s, %i, 2; cvt.u64.u32 %off, %s; add.u64 %p, %img, %off; mov.u32 %v, tile; add.u32 %s, %s, %v;
ld.global.u32 %v, [%p]; st.shared.u32 [%s], %v;
add.u32 %i, %i, 128; setp.lt.u32 %more, %i, {smem_bytes // 4};
@%more bra FILL;
{frags}
{zeros}
fence.proxy.async.shared::cta; bar.sync 0;
wgmma.fence.sync.aligned;
{chr(10).join(body)}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{stores}
ret;
}}
"""


def descriptor(start: int, lbo: int, sbo: int, swizzle: str) -> int:
    """wgmma matrix descriptor relative to the tile."""
    code = {"none": 0, "128B": 1, "64B": 2, "32B": 3}[swizzle]
    return start >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | code << 62


def small_integers(rng: np.random.Generator, count: int, typ: str) -> np.ndarray:
    """16-bit patterns of integers -8..8, whose products sum without rounding."""
    values = rng.integers(-8, 9, count).astype(np.float32)
    return (
        (values.view(np.uint32) >> 16).astype(np.uint16)
        if typ == "bf16"
        else values.astype(np.float16).view(np.uint16)
    )


def wgmma_cases() -> list[Case]:
    cases = []
    span = {"none": 16, "32B": 32, "64B": 64, "128B": 128}

    def layout(swizzle: str, mn: bool, rows: int) -> tuple[int, int, int]:
        """(LBO, SBO, bytes) of an operand of 16 k."""
        if not mn:
            if swizzle == "none":
                return 128, 256, rows // 8 * 256
            return 16, 8 * span[swizzle], max(rows // 8, 1) * 8 * span[swizzle]
        if swizzle == "none":  # k blocks LBO apart, row blocks SBO apart
            return rows // 8 * 128, 128, rows // 8 * 128 * 2
        per = span[swizzle] // 2
        blocks = -(-rows // per)
        return 16 * span[swizzle], 8 * span[swizzle], blocks * 16 * span[swizzle]

    def add(name, n, a_swz, a_mn, b_swz, b_mn, a_regs=False, typ="bf16", steps=1):
        rng = _rng(name)
        la, sa, bytes_a = layout(a_swz, a_mn, 64)
        lb, sb, bytes_b = layout(b_swz, b_mn, n)
        start_b = -(-bytes_a // 1024) * 1024
        total = start_b + -(-bytes_b // 1024) * 1024 + 1024
        image = small_integers(rng, total // 2, typ)
        fragment = small_integers(rng, 4 * 128 * 2, typ).view(np.uint32)
        out = np.zeros(128 * n // 2, np.float32)
        da, db = descriptor(0, la, sa, a_swz), descriptor(start_b, lb, sb, b_swz)
        step_a = 2 if steps > 1 and not a_mn else 0
        step_b = 2 if steps > 1 and not b_mn else 0
        ptx = _wgmma_kernel(n, total, a_regs, typ, int(a_mn), int(b_mn), steps)
        args = [0, 1, 2, ("u64", da), ("u64", db), ("u64", step_a), ("u64", step_b)]
        cases.append(Case(name, ptx, [image, fragment, out], [2], args, block=128))

    for swizzle in span:
        for a_mn in (False, True):
            add(f"wgmma_a_{swizzle}_{'mn' if a_mn else 'k'}", 64, swizzle, a_mn, "128B", False)
        for b_mn in (False, True):
            add(f"wgmma_b_{swizzle}_{'mn' if b_mn else 'k'}", 128, "128B", False, swizzle, b_mn)
    add("wgmma_n256_mn", 256, "128B", False, "128B", True)
    add("wgmma_n8", 8, "128B", False, "128B", False)
    add("wgmma_registers", 64, "128B", False, "128B", False, a_regs=True)
    add("wgmma_registers_mn", 128, "128B", False, "128B", True, a_regs=True)
    add("wgmma_steps", 128, "128B", False, "128B", False, steps=4)
    add("wgmma_f16", 64, "128B", False, "64B", False, typ="f16")
    return cases


def mma_cases() -> list[Case]:
    copies = "\n".join(
        f"ld.shared.u32 %v, [%s+{128 * i}]; st.global.u32 [%o+{128 * (14 + i)}], %v;" for i in range(4)
    )
    ptx = f"""{HEADER}
.visible .entry k(.param .u64 img, .param .u64 out)
{{
.reg .b32 %t, %s, %v, %r<16>; .reg .f32 %f<8>; .reg .b64 %img, %o, %p, %off; .reg .pred %more; .reg .b32 %i;
.shared .align 128 .b8 tile[1024];
ld.param.u64 %img, [img]; ld.param.u64 %o, [out]; mov.u32 %t, %tid.x;
mul.wide.u32 %off, %t, 4; add.u64 %o, %o, %off; mov.u32 %i, %t;
FILL: shl.b32 %s, %i, 2; cvt.u64.u32 %off, %s; add.u64 %p, %img, %off; mov.u32 %v, tile; add.u32 %s, %s, %v;
ld.global.u32 %v, [%p]; st.shared.u32 [%s], %v;
add.u32 %i, %i, 32; setp.lt.u32 %more, %i, 256; @%more bra FILL;
bar.sync 0;
shl.b32 %s, %t, 4; mov.u32 %v, tile; add.u32 %s, %s, %v;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r0, %r1, %r2, %r3}}, [%s];
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%r4, %r5, %r6, %r7}}, [%s];
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r8, %r9}}, [%s];
mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0f40000000; mov.f32 %f2, 0f40400000; mov.f32 %f3, 0f40800000;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%f4, %f5, %f6, %f7}},
    {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}},
    {{%f0, %f1, %f2, %f3}};
bar.sync 0;
stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%s], {{%r0, %r1, %r2, %r3}};
bar.sync 0;
add.u32 %v, %v, 512;
{chr(10).join(f"st.global.u32 [%o+{128 * i}], %r{i};" for i in range(10))}
{chr(10).join(f"st.global.f32 [%o+{128 * (10 + i)}], %f{4 + i};" for i in range(4))}
mov.u32 %v, tile; shl.b32 %s, %t, 2; add.u32 %s, %s, %v;
{copies}
ret;
}}
"""
    rng = _rng("mma")
    image = small_integers(rng, 512, "bf16")
    return [Case("mma_ldmatrix", ptx, [image, np.zeros(18 * 32, np.uint32)], [1], [0, 1])]


def named_barrier_cases() -> list[Case]:
    """Two warps hand a value back and forth with bar.arrive and bar.sync on two ids."""
    ptx = f"""{HEADER}
.visible .entry k(.param .u64 out)
{{
.reg .b32 %t, %v, %i, %s; .reg .b64 %o, %off; .reg .pred %first, %more; .shared .align 4 .b8 cell[128];
ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mul.wide.u32 %off, %t, 4; add.u64 %o, %o, %off;
setp.lt.u32 %first, %t, 32; and.b32 %s, %t, 31; shl.b32 %s, %s, 2; mov.u32 %v, cell; add.u32 %s, %s, %v;
mov.u32 %v, %t; mov.u32 %i, 0;
@!%first bra SECOND;
A: st.shared.u32 [%s], %v; bar.arrive 1, 64; bar.sync 2, 64; ld.shared.u32 %v, [%s]; mad.lo.u32 %v, %v, 3, 1;
add.u32 %i, %i, 1; setp.lt.u32 %more, %i, 5; @%more bra A; bra END;
SECOND:
B: bar.sync 1, 64; ld.shared.u32 %v, [%s]; xor.b32 %v, %v, 85; st.shared.u32 [%s], %v; bar.arrive 2, 64;
add.u32 %i, %i, 1; setp.lt.u32 %more, %i, 5; @%more bra B;
END: bar.sync 0; st.global.u32 [%o], %v;
ret;
}}
"""
    return [Case("named_barriers", ptx, [np.zeros(64, np.uint32)], [0], [0], block=64)]


def all_cases() -> list[Case]:
    """Every case, in a fixed order."""
    return [
        *scalar_cases(),
        *tma_cases(),
        *mbarrier_cases(),
        *wgmma_cases(),
        *mma_cases(),
        *named_barrier_cases(),
    ]
