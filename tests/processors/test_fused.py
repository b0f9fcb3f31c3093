"""The fused work without a GPU: twins are stock's own numbers, kernels interpreted, and compiled for GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import videoattn
from tests.pipelines import GUIDANCE_ON, call_ltx2, ltx2_inputs, ltx2_pipeline, ltx2_transformer
from videoattn.processors import fused, fused_kernels, residual_kernels

ROOT = Path(__file__).parents[2]
# LTX-2.3's video stream.
CHANNELS, HEADS, HEAD_DIM = 4096, 32, 128


@pytest.mark.slow
def test_interpreted_kernels():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    file = str(Path(__file__).with_name("interpreted.py"))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


@pytest.mark.slow
def test_the_package_does_not_import_triton():
    code = (
        "import sys, videoattn; from tests.pipelines import ltx_transformer\n"
        "before = 'triton' in sys.modules\n"
        "handle = videoattn.install(ltx_transformer(layers=1), level='block')\n"
        "print(before, 'triton' in sys.modules, 'by torch, on cpu' in handle.around)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    before, after, torch_does_it = result.stdout.split()[-3:]
    assert torch_does_it == "True", result.stderr
    assert before == after


@pytest.mark.parametrize("version", ["2.0", "2.5"])
@pytest.mark.parametrize("level", ["attention", "block"])
def test_twins_are_stock_bit_for_bit(version, level):
    stock, ours = (ltx2_transformer(version, layers=1).bfloat16() for _ in range(2))
    inputs = ltx2_inputs(version=version, dtype=torch.bfloat16)
    # Two per-token timesteps, as image-to-video has them.
    inputs["timestep"] = torch.where(torch.arange(36) < 12, 0.0, 500.0)[None]
    inputs["audio_timestep"] = torch.full((1,), 500.0)
    if version == "2.5":
        inputs["video_keyframes_mask"] = (torch.arange(36) < 12)[None, :, None]
    for name in ("encoder_attention_mask", "audio_encoder_attention_mask"):
        inputs[name] = None
    videoattn.install(ours, level=level)
    with torch.no_grad():
        for a, b in zip(ours(**inputs), stock(**inputs), strict=True):
            assert torch.equal(a, b)


def test_a_guided_pipeline_at_level_block():
    """Classifier-free, spatio-temporal and modality-isolating guidance: every branch of a block."""
    guided = {**GUIDANCE_ON, "spatio_temporal_guidance_blocks": [0]}
    stock = call_ltx2(ltx2_pipeline("2.3", layers=1), **guided)
    pipe = ltx2_pipeline("2.3", layers=1)
    videoattn.install(pipe, level="block")
    for ours, theirs in zip(call_ltx2(pipe, **guided), stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def compiled(kernel, pointers, constants, capability):
    """A kernel compiled for a GPU that need not be here, all pointers and strides multiples of 16."""
    names = kernel.arg_names
    signature = {}
    aligned = {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers or name.endswith("stride"):
            signature[name] = pointers.get(name, "i32")
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.endswith("eps") else "i32"
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    warps = fused_kernels._warps(CHANNELS)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def spilled(kernel, tmp_path):
    """Bytes of a thread's stack."""
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run(
        [tool, "-res-usage", str(tmp_path / "kernel.cubin")], capture_output=True, text=True, check=True
    ).stdout
    return int(listing.partition("STACK:")[2].split()[0])


def norm_rotate_case(rope, half, apart=False):
    bf16 = dict.fromkeys(("x", "x_out", "x_weight", "y", "y_out", "y_weight"), "*bf16")
    fp32 = dict.fromkeys(("cos", "sin", "y_cos", "y_sin"), "*fp32")
    constants = {
        "AFFINE": True, "TWO": not apart, "APART": apart, "PAIRS": CHANNELS // 2, "BLOCK": CHANNELS // 2,
        "HALF": half, "ROPE": rope, "ROWS": fused_kernels.ROWS,
    }  # fmt: skip
    return fused_kernels._norm_rotate_kernel, {**bf16, **fp32}, constants


def residual_case():
    kernel = residual_kernels._residual_norm_kernel
    constants = {
        "BRANCH": True, "GATED": True, "NORM": True, "AFFINE": False, "MODULATIONS": 2,
        "GATE_PER_ROW": False, "SCALE_PER_ROW": False, "CHANNELS": CHANNELS, "BLOCK": CHANNELS,
        "ROWS": fused_kernels.ROWS,
    }  # fmt: skip
    pointers = kernel.arg_names[: kernel.arg_names.index("x_batch_stride")]
    return kernel, dict.fromkeys(pointers, "*bf16"), constants


def pair_case():
    """LTX-2.3's video stream and its audio stream of half the width."""
    kernel, _, constants = residual_case()
    pair = residual_kernels._residual_norm_pair_kernel
    half = {**constants, "CHANNELS": CHANNELS // 2, "BLOCK": CHANNELS // 2}
    each = {f"A_{name}": value for name, value in constants.items()}
    each |= {f"B_{name}": value for name, value in half.items()}
    pointers = kernel.arg_names[: kernel.arg_names.index("x_batch_stride")]
    return pair, {f"{letter}_{name}": "*bf16" for letter in "ab" for name in pointers}, each


def gate_case():
    constants = {"HEADS": HEADS, "HEAD_BLOCK": HEADS, "HEAD_DIM": HEAD_DIM, "DIM_BLOCK": HEAD_DIM}
    return fused_kernels._gate_kernel, dict.fromkeys(("x", "logits", "out"), "*bf16"), constants


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        (norm_rotate_case(fused_kernels.SPLIT, HEAD_DIM // 2), 90),
        (norm_rotate_case(fused_kernels.INTERLEAVED, 1), 90),
        (norm_rotate_case(fused_kernels.SPLIT, HEAD_DIM // 2, apart=True), 90),
        (norm_rotate_case(fused_kernels.NO_ROPE, CHANNELS // 2, apart=True), 90),
        (residual_case(), 90),
        (gate_case(), 90),
        (pair_case(), 90),
        (pair_case(), 100),
        (residual_case(), 100),
    ],
    ids=[
        "split",
        "interleaved",
        "split-apart",
        "norms-apart",
        "residual",
        "gate",
        "pair",
        "pair-blackwell",
        "residual-blackwell",
    ],
)
def test_compiled_at_full_width(case, capability, tmp_path):
    """Wide loads and stores, and no register on the stack: what a kernel bound by memory needs."""
    kernel = compiled(*case, capability)
    ptx = kernel.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert spilled(kernel, tmp_path) == 0


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp16"])
def test_a_product_is_rounded_before_a_sum(dtype, capability):
    """No multiplication in 16 bits, which ptxas may fuse with the sum behind it, and LLVM does."""
    kernel, pointers, constants = residual_case()
    ptx = compiled(kernel, dict.fromkeys(pointers, dtype), constants, capability).asm["ptx"]
    assert not re.findall(r"\b(?:fma|mul)\.[\w.]*f16\w*", ptx)
    assert re.search(r"\bfma\.rn\.f32", ptx)


def test_unknown_engine():
    with pytest.raises(ValueError, match="'triton' or 'torch', not 'cuda'"):
        fused.Fusion("cuda")  # type: ignore[arg-type]


@pytest.mark.slow
def test_traced_for_a_gpu_kernels_write_fresh_buffers_alone():
    """What torch.compile takes for written it copies first: only outputs may be among it."""
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("trace_for_gpu.py"))],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [
        ["x_out", "y_out"],
        ["out"],
        ["x_out"],
        ["out", "out2", "x_out"],
        ["out"],
        ["x_out", "y_out"],
        ["x_out", "y_out"],
        ["a_out", "a_out2", "a_x_out", "b_out", "b_out2"],
        ["x_out"],
    ]


def test_kernels_are_launched_on_their_tensors_device(monkeypatch):
    """By a CUDA that only notes which device is current."""
    current = [0]

    @contextmanager
    def on(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    for device, where in (("cuda:1", 1), ("cuda:0", 0), ("cpu", 0)):
        assert fused._launched(lambda given: (given, current[0]), torch.device(device), "x") == ("x", where)
    assert current == [0]
