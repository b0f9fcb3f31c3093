"""PTX text: scopes, operands, and one-line errors for what is malformed."""

from __future__ import annotations

import random
import re

import pytest
import small_gemm

from videoattn.ptxsim import Module, PtxSimError, PtxSyntaxError
from videoattn.ptxsim.parser import parse_ptx
from videoattn.ptxsim.ptx import Imm, Mem, Pair, Vec

HEAD = ".version 8.3\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, params: str = "") -> str:
    return f"{HEAD}.visible .entry k({params})\n{{\n{body}\nret;\n}}\n"


def entry(body: str):
    return parse_ptx(kernel(body)).entries["k"]


def test_names_and_labels_may_repeat_in_inner_scopes():
    block = "{ .reg .pred p; AGAIN: setp.eq.u32 p, %a, 0; @p bra AGAIN; bra.uni OUT; OUT: }\n"
    e = entry(".reg .b32 %a;\n" + block + block)
    branches = [i for i in e.instrs if i.parts[0] == "bra"]
    targets = [e.labels[b.operands[0].name] for b in branches]
    assert targets == [0, 3, 3, 6]
    preds = {i.pred.index for i in branches if i.pred}
    assert len(preds) == 2


def test_an_inner_register_hides_an_outer_one():
    e = entry(".reg .b32 x; { .reg .b64 x; mov.b64 x, 1; } mov.b32 x, 2;")
    assert [i.operands[0].type for i in e.instrs[:2]] == ["b64", "b32"]


def test_operand_forms():
    e = entry(
        ".reg .b32 %r<4>; .reg .pred p, q; .reg .b64 %a;\n"
        "ld.global.v2.u32 {%r0, %r1}, [%a+-8];\nsetp.lt.s32 p|q, %r0, -5;\nmov.f32 %r2, 0fBF800000;\n"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%a, {%r0, %r1}], [%r2];"
    )
    load, compare, move, store = e.instrs[:4]
    assert isinstance(load.operands[0], Vec)
    assert load.operands[1] == Mem(e.regs[6], -8)
    assert isinstance(compare.operands[0], Pair)
    assert compare.operands[2] == Imm(-5, "i")
    assert move.operands[1] == Imm(0xBF800000, "f32")
    assert len(store.operands[0].coords) == 2


def test_source_lines_name_the_caller_of_inlined_code():
    e = entry(
        ".reg .b32 %a;\n.loc 1 10 3\nmov.u32 %a, 1;\n"
        ".loc 2 7 1, function_name $L__info, inlined_at 1 12 5\nmov.u32 %a, 2;"
    )
    assert e.instrs[0].loc == (1, 10)
    assert e.instrs[1].loc == (2, 7, 1, 12)


def test_parameters_are_laid_out_by_alignment():
    e = parse_ptx(
        kernel("", ".param .u32 a, .param .align 64 .b8 m[128], .param .u64 .ptr .align 1 p")
    ).entries["k"]
    assert [(p.address, p.size) for p in e.params] == [(0, 4), (64, 128), (192, 8)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".version 8.3\n", "no .target"),
        (kernel("mov.u32 %x, 1;"), "PTX line 6: register %x is not declared"),
        (kernel(".reg .b32 %a; bra NOWHERE;"), "unknown label NOWHERE"),
        (kernel(".reg .b32 %a; mov.u32 %a 1;"), "expected ',' or ';'"),
        (kernel(".reg .b99 %a;"), "register type .b99 is not known"),
        (HEAD + ".visible .entry k()\n{ ret;", "the file ends inside a statement"),
        (kernel("L: L: ret;"), "label L appears twice"),
        (kernel(".reg .b32 %a; @%a ret;"), "not a declared predicate"),
        ("hello", "unexpected 'hello' at module level"),
        (kernel("mov.u32 `a, 1;"), "unexpected character '`'"),
    ],
)
def test_malformed_text_gives_one_line(text, message):
    with pytest.raises(PtxSyntaxError) as error:
        Module.from_ptx(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_damage_to_a_file_gives_anything_but_one_line():
    """Tokens dropped, doubled and exchanged at random: a parse, or an error of the simulator's own."""
    rng = random.Random(11)
    tokens = re.findall(r"\w+|\s+|[^\w\s]", small_gemm.PTX)
    errors = 0
    for _ in range(120):
        damaged = list(tokens)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.choice((0, 1))] = rng.choice(([], [rng.choice(tokens)]))
        messages = []
        try:
            for kernel in Module.from_ptx("".join(damaged)).entries.values():
                kernel.unsupported()
        except PtxSimError as error:
            messages.append(str(error))
        assert not any("\n" in m for m in messages)
        errors += len(messages)
    assert errors > 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cvt;", "PTX line 7: cvt: its operands or modifiers do not fit it"),
        ("mbarrier;", "PTX line 7: mbarrier: its operands"),
        ("ld.param.u32 %a, [nowhere];", "nowhere is no parameter"),
        ("mov.u32 %a, -%b;", "expected a number, found '%b'"),
    ],
)
def test_instructions_that_do_not_hold_together(text, message):
    with pytest.raises(PtxSyntaxError, match=re.escape(message)):
        Module.from_ptx(kernel(f".reg .b32 %a, %b;\n{text}")).entry("k").unsupported()
