"""The self-check with real child processes: passing, wrong, crashing and hanging kernels."""

from __future__ import annotations

import pytest
import torch

from videoattn.kernels import native, verify
from videoattn.kernels.verify import Subject, Verdict

SUBJECT = Subject("hopper", "NVIDIA H200 / MIG 1g", "580.159.04", "0123abcd")

KERNELS = {
    "wrong": """
from videoattn.kernels import sdpa
def run(q, k, v, **options):
    out, lse = sdpa.run(q, k, v, **options)
    out[:, -1, -1, 5] += 0.05
    return out, lse
""",
    "wrong_lse": """
from videoattn.kernels import sdpa
def run(q, k, v, **options):
    out, lse = sdpa.run(q, k, v, **options)
    return out, lse + 0.002
""",
    "wrong_gates": """
from videoattn.kernels import sdpa
GATES = True
def run(q, k, v, gate=None, **options):
    out, lse = sdpa.run(q, k, v, **options)
    if gate is not None:
        out = out * (2 * gate.sigmoid())[..., None]
        out[:, -1, -1, -1] *= 1.1
    return out, lse
""",
    "crashing": "import os\ndef run(q, k, v, **options):\n    os.abort()\n",
    "raising": "def run(q, k, v, **options):\n    raise RuntimeError('illegal memory access')\n",
    # Its own child inherits the output and would outlive it.
    "hanging": """
import subprocess, time
def run(q, k, v, **options):
    subprocess.Popen(["sleep", "1000"])
    time.sleep(1000)
""",
    "segfaulting": "import ctypes\ndef run(q, k, v, **options):\n    ctypes.string_at(0)\n",
    "full": "import torch\ndef run(q, k, v, **options):\n    raise torch.OutOfMemoryError('full')\n",
}


@pytest.fixture
def kernel_module(tmp_path, monkeypatch):
    """Writes one of KERNELS as an importable module of the child process."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name):
        (tmp_path / f"{name}_kernel.py").write_text(KERNELS[name])
        return f"{name}_kernel"

    return write


@pytest.mark.slow
def test_a_right_kernel_passes():
    verdict = verify.run_child("videoattn.kernels.sdpa", "cpu", 600)
    assert verdict.passed, verdict.detail
    assert "agree with fp32" in verdict.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timeout_s", "detail"),
    [
        ("wrong", 300, "max"),
        ("wrong_lse", 300, "LSE 2.00e-03"),
        ("wrong_gates", 300, "the gates are wrong"),
        ("crashing", 300, "status -6"),
        ("raising", 300, "illegal memory access"),
        ("segfaulting", 300, "status -11"),
        ("hanging", 8, "no answer within 8 s"),
    ],
)
def test_a_broken_kernel_fails_and_says_how(kernel_module, name, timeout_s, detail):
    verdict = verify.run_child(kernel_module(name), "cpu", timeout_s)
    assert not verdict.passed
    assert verdict.final
    assert detail in verdict.detail


@pytest.mark.slow
def test_a_full_or_missing_device_is_no_verdict(kernel_module, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for module, device in ((kernel_module("full"), "cpu"), ("videoattn.kernels.sdpa", "cuda:0")):
        verdict = verify.run_child(module, device, 300)
        assert (verdict.passed, verdict.final) == (False, False), verdict.detail


def test_verdicts_outlive_the_process_and_belong_to_their_build(tmp_path, monkeypatch):
    monkeypatch.setenv("VIDEOATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(verify, "_known", {})
    assert verify.recall(SUBJECT) is None
    verify.remember(SUBJECT, Verdict(True, "fine"))
    verify._known.clear()  # as another process
    assert verify.recall(SUBJECT) == Verdict(True, "fine")
    for change in ({"gpu": "NVIDIA B200"}, {"driver": "590.1"}, {"build": "ffff"}, {"kernel": "blackwell"}):
        fields = {name: getattr(SUBJECT, name) for name in ("kernel", "gpu", "driver", "build")}
        assert verify.recall(Subject(**{**fields, **change})) is None
    SUBJECT.path.write_text("{half a ver")
    assert verify.recall(SUBJECT) is None


def test_what_is_no_verdict_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("VIDEOATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(verify, "_known", {})
    verify.remember(SUBJECT, Verdict(False, "no memory is left", final=False))
    assert verify.recall(SUBJECT) is not None
    verify._known.clear()
    assert verify.recall(SUBJECT) is None


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIDEOATTN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(verify, "_known", {})
    with pytest.warns(RuntimeWarning, match="later processes run it again"):
        verify.remember(SUBJECT, Verdict(True, "fine"))
    assert verify.recall(SUBJECT) == Verdict(True, "fine")


def test_problems_poison_what_lengths_hide():
    problem = next(p for p in verify.problems() if p.lengths == (0, 333))
    _, k, v, lengths = problem.inputs("cpu")
    assert lengths is not None
    assert lengths.tolist() == [0, 333]
    assert k[0].isnan().all()
    assert not k[1, :333].isnan().any()
    assert v[1, 333:].isnan().all()


@pytest.mark.parametrize(("arch", "sms"), [(90, 132), (90, 114), (100, 148), (103, 160)])
def test_problems_split_keys_on_every_architecture(arch, sms):
    """The merge kernel of each dtype and head dim runs before `auto` trusts the family."""
    split = {
        (p.dtype, p.head_dim)
        for p in verify.problems()
        if native.workspace_bytes(p.batch, p.heads, p.q_len, p.kv_len, p.head_dim, arch, sms)
    }
    assert split == {(dtype, head_dim) for dtype in (torch.bfloat16, torch.float16) for head_dim in (64, 128)}


def test_problems_cover_both_dtypes_and_head_dims():
    assert {(p.dtype, p.head_dim) for p in verify.problems()} == {
        (dtype, head_dim) for dtype in (torch.bfloat16, torch.float16) for head_dim in (64, 128)
    }
