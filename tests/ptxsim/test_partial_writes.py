"""An instruction gives a lane the same whether the whole warp runs it, one side of a branch, or a guard."""

from __future__ import annotations

import re

import numpy as np
import pytest

from videoattn.ptxsim import Device, Module

LANES = 32

# %h0-%h2 (b16), %r0-%r2, %q0-%q2 and %p0, %p1 are sources; without a number they are destinations
FLOATS = """add.f32 %r, %r0, %r1 | add.rz.f32 %r, %r0, 0f3F9D70A4 | sub.rm.f32 %r, %r0, -1.5
mul.rp.f32 %r, %r0, %r1
mul.ftz.f32 %r, 0f00000001, %r1 | fma.rn.f32 %r, %r0, %r1, %r2 | fma.rm.f32 %r, %r0, %r1, 0fBF800000
fma.rn.sat.f32 %r, %r0, %r1, %r2 | mad.rn.f32 %r, %r0, %r1, %r2 | div.rn.f32 %r, %r0, %r1
div.full.f32 %r, %r0, %r1 | min.f32 %r, %r0, %r1 | max.NaN.f32 %r, %r0, %r1, %r2
max.ftz.f32 %r, %r0, 0f00000000
neg.f32 %r, %r0 | abs.ftz.f32 %r, %r0 | sqrt.rn.f32 %r, %r0
ex2.approx.ftz.f32 %r, %r0 | rcp.approx.f32 %r, %r0 | rsqrt.approx.f32 %r, %r0 | lg2.approx.f32 %r, %r0
sin.approx.f32 %r, %r0 | tanh.approx.f32 %r, %r0 | copysign.f32 %r, %r0, %r1
add.rn.f32x2 %q, %q0, %q1 | mul.rn.f32x2 %q, %q0, %q1 | fma.rn.f32x2 %q, %q0, %q1, %q2
add.rz.f32x2 %q, %q0, %q1
add.f64 %q, %q0, %q1 | mul.f64 %q, %q0, 0d4008000000000000 | fma.rn.f64 %q, %q0, %q1, %q2
max.f64 %q, %q0, %q1
neg.f64 %q, %q0 | add.f16 %h, %h0, %h1 | mul.f16 %h, %h0, %h1 | fma.rn.f16 %h, %h0, %h1, %h2
add.f16x2 %r, %r0, %r1
fma.rn.f16x2 %r, %r0, %r1, %r2 | add.rn.bf16x2 %r, %r0, %r1 | mul.bf16x2 %r, %r0, %r1 | sub.bf16 %h, %h0, %h1
fma.rn.bf16 %h, %h0, %h1, %h2 | max.f16x2 %r, %r0, %r1 | min.bf16 %h, %h0, %h1 | neg.bf16x2 %r, %r0
abs.f16 %h, %h0
ex2.approx.f16x2 %r, %r0 | ex2.approx.ftz.bf16 %h, %h0 | setp.lt.f32 %p, %r0, %r1
setp.neu.f32 %p, %r0, 0f3F800000
setp.gtu.ftz.f32 %p, %r0, %r1 | setp.nan.f32 %p, %r0, %r1 | setp.le.f64 %p, %q0, %q1
setp.gt.f16 %p, %h0, %h1
setp.eq.bf16 %p, %h0, %h1 | setp.lt.and.s32 %p, %r0, %r1, %p0 | setp.ge.or.u64 %p, %q0, 5, !%p0
set.lt.u32.f32 %r, %r0, %r1 | set.gt.ftz.f32.f32 %r, %r0, %r1 | selp.f32 %r, %r0, 0f40000000, %p0
selp.f64 %q, %q0, 0d3FF0000000000000, %p0 | slct.f32.s32 %r, %r0, %r1, %r2 | testp.finite.f32 %p, %r0
testp.notanumber.f64 %p, %q0 | not.pred %p, %p0 | and.pred %p, %p0, %p1 | xor.pred %p, %p0, %p1
mov.pred %p, %p0
cvt.rn.f16.f32 %h, %r0 | cvt.rn.bf16.f32 %h, %r0 | cvt.rz.bf16.f32 %h, %r0 | cvt.f32.f16 %r, %h0
cvt.f32.bf16 %r, %h0
cvt.rn.f32.f64 %r, %q0 | cvt.f64.f32 %q, %r0 | cvt.rn.bf16x2.f32 %r, %r0, %r1 | cvt.rn.f16x2.f32 %r, %r0, %r1
cvt.rn.relu.bf16x2.f32 %r, %r0, 0f40490FDB | cvt.rzi.s32.f32 %r, %r0 | cvt.rni.u16.f32 %h, %r0
cvt.rmi.s64.f32 %q, %r0
cvt.rpi.f32.f32 %r, %r0 | cvt.rzi.u32.f16 %r, %h0 | cvt.rzi.s32.f64 %r, %q0 | cvt.rn.f32.s32 %r, %r0
cvt.rz.f32.u64 %r, %q0 | cvt.rn.f64.s64 %q, %q0 | cvt.rn.f16.s32 %h, %r0 | cvt.sat.f32.f32 %r, %r0"""
MOVES = """mov.b32 %r, {%h0, %h1} | mov.b64 %q, {%r0, %r1} | mov.b64 %q, {%h0, %h1, %h2, %h0}
mov.b32 {%h, %h'}, %r0
mov.b64 {%r, %r'}, %q0 | mov.b64 {%h, %h', %h'', %h'''}, %q0 | mov.f32 %r, 0fBFC00000 | mov.f64 %q, -2.5
mov.u32 %r, %laneid | mov.u64 %q, cell | mov.u32 %r, cell | mov.b16 %h, -7 | mov.b64 %q, -1
ld.shared.u8 %h, [cell] | ld.shared.s8 %r, [cell+3] | ld.shared.s16 %q, [cell+2]
ld.shared.v2.b32 {%r, %r'}, [cell+8]
ld.shared.v4.f32 {%r, %r', %r'', %r'''}, [cell+16] | ld.shared.v2.u64 {%q, %q'}, [cell+32]
ld.shared.b16 %h, [cell+6]
ld.param.u32 %r, [number] | ld.param.s16 %q, [number] | cvta.shared.u64 %q, %q0 | cvta.to.shared.u64 %q, %q0
mapa.shared::cluster.u32 %r, %r0, 0 | isspacep.shared %p, %q0 | prmt.b32 %r, %r0, %r1, 0x7531
ld.global.u16 %r, [%in] | ld.global.v2.f32 {%r, %r'}, [%in+8] | ld.global.s8 %h, [%in+1]
atom.shared.or.b32 %r, [cell], 0"""


def programs() -> list[tuple[str, list[str]]]:
    """(instruction, its destinations), with destinations named apart."""
    out = []
    for n, text in enumerate(x.strip() for x in f"{FLOATS}|{MOVES}".replace("\n", "|").split("|")):
        named = re.sub(r"%([hrqp])(?!\w)('*)", lambda m, n=n: f"%{m[1]}d{n}_{len(m[2])}", text)
        out.append((named, re.findall(r"%[hrqp]d\d+_\d", named)))
    return out


def outputs(form: str) -> tuple[list[str], np.ndarray]:
    """The names of all destinations and their values [destination, lane], as 64-bit patterns."""
    code, others, stores, declared = [], [], [], []
    for text, destinations in programs():
        code.append(f"{text};")
        for name in destinations:
            bits = {"h": "b16", "r": "b32", "q": "b64", "p": "pred"}[name[1]]
            declared.append(f".reg .{bits} {name};")
            others.append(f"mov.{bits} {name}, {'%p2' if bits == 'pred' else 9};")
            place = f"[%out+{8 * LANES * len(stores)}]"
            stores.append(f"selp.b32 %flag, 1, 0, {name}; st.global.b32 {place}, %flag;" if bits == "pred"
                          else f"st.global.{bits} {place}, {name};")  # fmt: skip
    if form == "branch":
        body = ["@!%odd bra EVEN;", *code, "bra JOIN;", "EVEN:", *others, "JOIN:"]
    elif form == "guard":
        body = [f"@%odd {x}" for x in code] + [f"@!%odd {x}" for x in others]
    else:
        body = code
    text = f""".version 8.6
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out, .param .u32 number)
{{
.shared .align 64 .b8 cell[128];
.reg .b16 %h<3>; .reg .b32 %r<3>, %t, %flag; .reg .b64 %q<3>, %in, %out, %o; .reg .pred %p<3>, %odd;
{" ".join(declared)}
ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 8;
add.u64 %in, %in, %o; add.u64 %out, %out, %o; and.b32 %t, %t, 1; setp.ne.u32 %odd, %t, 0;
ld.global.b16 %h0, [%in]; ld.global.b16 %h1, [%in+256]; ld.global.b16 %h2, [%in+512];
ld.global.b32 %r0, [%in+768]; ld.global.b32 %r1, [%in+1024]; ld.global.b32 %r2, [%in+1280];
ld.global.b64 %q0, [%in+1536]; ld.global.b64 %q1, [%in+1792]; ld.global.b64 %q2, [%in+2048];
setp.lt.s32 %p0, %r0, %r1; setp.lt.s32 %p1, %r1, %r2; setp.eq.s32 %p2, %t, 7;
mov.u32 %flag, %tid.x; shl.b32 %flag, %flag, 2; mov.u32 %t, cell; add.u32 %t, %t, %flag;
st.shared.b32 [%t], %r0; bar.warp.sync -1;
{chr(10).join(body)}
{chr(10).join(stores)}
ret;
}}
"""
    rng = np.random.default_rng(4)
    values = np.zeros((9, LANES, 8), np.uint8)
    for row, dtype in enumerate([np.float16] * 3 + [np.float32] * 3 + [np.float64] * 3):
        size = np.dtype(dtype).itemsize
        values[row, :, :size] = rng.normal(size=LANES).astype(dtype).view(np.uint8).reshape(LANES, size)
    device = Device("sm_100a")
    source, out = device.upload(values), device.upload(np.zeros((len(stores), LANES), np.uint64))
    report = device.launch(Module.from_ptx(text).entry("k"), block=LANES, args=[source, out, 0x8123_4567])
    assert not report.findings, str(report)
    return [x for _, names in programs() for x in names], out.download()


@pytest.mark.parametrize("form", ["branch", "guard"])
def test_lanes_get_what_a_whole_warp_gets(form):
    names, whole = outputs("whole")
    _, part = outputs(form)
    odd = np.arange(LANES) % 2 == 1
    texts = {name: text for text, found in programs() for name in found}
    for name, want, got in zip(names, whole, part, strict=True):
        assert np.array_equal(got[odd], want[odd]), texts[name]
        assert set(got[~odd].tolist()) == {0 if name[1] == "p" else 9}, texts[name]


def test_unpacked_words_can_be_taken_apart_again():
    text = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
.reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %q<3>, %out;
ld.param.u64 %out, [out]; mov.u32 %r0, %tid.x; add.u32 %r0, %r0, 0x40003C00; cvt.u64.u32 %q0, %r0;
shl.b64 %q1, %q0, 32; or.b64 %q0, %q0, %q1; mov.b64 {%r1, %r2}, %q0; mov.b32 {%h1, %h2}, %r2;
add.f16x2 %r3, %r1, %r2;
and.b32 %r0, %r0, 31; mul.wide.u32 %q1, %r0, 8; add.u64 %out, %out, %q1;
st.global.b16 [%out], %h1; st.global.b16 [%out+2], %h2; st.global.b32 [%out+4], %r3; ret;
}
"""
    device = Device("sm_90a")
    out = device.upload(np.zeros((LANES, 4), np.float16))
    report = device.launch(Module.from_ptx(text).entry("k"), block=LANES, args=[out])
    assert not report.findings, str(report)
    one = (0x3C00 + np.arange(LANES)).astype(np.uint16).view(np.float16)
    assert np.array_equal(out.download().T, [one, np.full(LANES, 2), 2 * one, np.full(LANES, 4)])
