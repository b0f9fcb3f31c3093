"""Launching: arguments, impossible launches, unsupported instructions, counts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from videoattn import ptxsim
from videoattn.ptxsim import (
    Device,
    LaunchError,
    Module,
    PtxSyntaxError,
    TensorMap,
    UnsupportedInstruction,
    scalar,
)
from videoattn.ptxsim.context import Context

HEAD = ".version 8.3\n.target sm_90a\n.address_size 64\n"
PARAMS = (
    ".param .u64 out, .param .u32 n, .param .f32 x, .param .align 64 .b8 map[128], .param .align 4 .b8 s[8]"
)
PTX = f"""{HEAD}.visible .entry k({PARAMS})
{{
.reg .b32 %n, %x, %t, %a; .reg .b64 %o, %f;
ld.param.u64 %o, [out]; ld.param.u32 %n, [n]; ld.param.f32 %x, [x]; ld.param.u32 %a, [s+4];
mov.u32 %t, %tid.x; mul.wide.u32 %f, %t, 16; add.u64 %o, %o, %f;
st.global.v4.u32 [%o], {{%n, %x, %a, %t}};
ret;
}}
"""


def setup():
    device = Device("sm_90a")
    out = device.upload(np.zeros((32, 4), np.uint32))
    tm = TensorMap(out, dtype="u32", dims=(4, 32), strides=(16,), box=(4, 8))
    return device, out, [out, 7, 1.5, tm, b"\0\0\0\0\x05\0\0\0"]


def test_arguments_arrive_by_their_declared_type():
    device, out, args = setup()
    report = device.launch(Module.from_ptx(PTX).entry("k"), block=32, args=args, roles={"only": [0]})
    assert not report.findings
    rows = out.download()
    assert (rows[:, 0] == 7).all()
    assert (rows[:, 1].view(np.float32) == 1.5).all()
    assert (rows[:, 2] == 5).all()
    assert (rows[:, 3] == np.arange(32)).all()
    assert report.counts["only"]["ld.param.u32"] == 2
    assert report.instructions == 9


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, 1.5, "argument 0 (.u64) cannot hold the float 1.5"),
        (1, 2**40, "argument 1 (.u32) cannot hold 1099511627776"),
        (1, None, "a NoneType cannot be passed"),
        (3, 5, "cannot hold the integer 5; give bytes"),
        (4, b"\0", "has 8 bytes, 1 were given"),
    ],
)
def test_a_wrong_argument_gives_one_line(index, value, message):
    device, _, args = setup()
    args[index] = value
    with pytest.raises(LaunchError) as error:
        device.launch(Module.from_ptx(PTX).entry("k"), block=32, args=args)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 1025}, "must be 1..1024"),
        ({"grid": 3, "cluster": 2}, "not a multiple of the cluster"),
        ({"block": 512, "registers": 168}, "512 threads of 168 registers; an SM has 65536 registers"),
        ({"registers": 256}, r"256 registers a thread; must be 1\.\.255"),
        ({"grid": 0}, "up to three positive sizes"),
        ({"dynamic_smem": 300_000}, "at most 232448"),
        ({"args": []}, "takes 5 arguments, 0 were given"),
    ],
)
def test_an_impossible_launch_gives_one_line(change, message):
    device, _, args = setup()
    ptx = PTX.replace("ret;", "mov.u32 %t, dyn; ret;").replace(
        ".visible", ".extern .shared .align 16 .b8 dyn[];\n.visible"
    )
    with pytest.raises(LaunchError, match=message):
        device.launch(Module.from_ptx(ptx).entry("k"), **({"block": 32, "args": args} | change))


def test_the_wrong_architecture_is_refused():
    _, _, args = setup()
    with pytest.raises(LaunchError, match="built for sm_90a, the device is sm_100a"):
        Device("sm_100a").launch(Module.from_ptx(PTX).entry("k"), block=32, args=args)
    with pytest.raises(LaunchError, match="is not one of"):
        Device("sm_80")


def test_an_unknown_entry_is_named():
    with pytest.raises(LaunchError, match="no entry 'other'; the module has k"):
        Module.from_ptx(PTX).entry("other")


def body(text: str) -> Module:
    return Module.from_ptx(
        f"{HEAD}.visible .entry k()\n{{\n.reg .b32 %a, %b; .reg .pred %p;\n{text}\nret;\n}}\n"
    )


def test_an_unsupported_instruction_names_opcode_and_line_when_reached():
    module = body("mov.u32 %a, 1;\nvadd4.u32.u32.u32 %a, %a, %a, %a;")
    with pytest.raises(UnsupportedInstruction) as error:
        Device("sm_90a").launch(module.entry("k"), block=32)
    assert (error.value.opcode, error.value.line) == ("vadd4.u32.u32.u32", 8)
    assert [u.line for u in module.entry("k").unsupported()] == [8]


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.ca.shared.global [%a], [%a], 16;",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%a], %b, [%a];",
        "add.sat.s32 %a, %a, %b;",
        "tcgen05.cp.cta_group::1.128x256b [%a], %a;",
        "tcgen05.mma.cta_group::1.kind::tf32 [%a], [%a], %a, %b, %p;",
        "cp.async.bulk.tensor.1d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [1], [2, {0}], [1];",
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%a, %a, %a, %a}, %a, %a, %p;",
        "tex.2d.v4.f32.f32 {%a, %a, %a, %a}, [%a, {%a, %b}];",
    ],
)
def test_what_is_outside_the_model_is_refused_by_name(text):
    (error,) = body(f"mov.u32 %a, 1;\n{text}").entry("k").unsupported()
    assert (error.opcode, error.line) == (text.split()[0], 8)


def test_one_that_is_not_reached_does_not_matter():
    module = body(
        "setp.eq.u32 %p, 1, 1; @%p bra END;\nvadd4.u32.u32.u32 %a, %a, %a, %a;\nEND: nanosleep.u32 1;"
    )
    assert not Device("sm_90a").launch(module.entry("k"), block=32).findings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.u32 %a, %b;", "add.u32: needs 3 operands, has 2"),
        ("add.u64 %a, %a, %a;", "too narrow"),
        ("add.u32 %p, %a, %a;", "destination %p is .pred"),
        ("add.f32 %a, %a, 1;", "integer constant where a float is needed"),
    ],
)
def test_malformed_instructions_give_one_line(text, message):
    with pytest.raises(PtxSyntaxError, match=message):
        Device("sm_90a").launch(body(text).entry("k"), block=32)


def test_torch_tensors_come_back_as_torch_tensors():
    torch = pytest.importorskip("torch")
    x = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    back = Device().upload(x).download()
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, x)


def test_an_endless_loop_stops():
    report = Device("sm_90a").launch(body("L: bra L;").entry("k"), block=32, limit=10_000)
    assert report.errors[0].kind == "stopped"
    assert "no end after 10000 blocks" in report.errors[0].message


def test_every_machine_operation_that_is_emitted_exists():
    """Emitters write calls as text, so nothing but this (or a kernel that runs them) sees a wrong name."""
    called = {
        (owner, name)
        for file in Path(ptxsim.__file__).parent.glob("*.py")
        for owner, name in re.findall(r"(?<![\w.])(C|sc)\.([a-z]\w*)\(", file.read_text())
    }
    assert len(called) > 60
    assert [c for c in called if not hasattr({"C": Context, "sc": scalar}[c[0]], c[1])] == []
