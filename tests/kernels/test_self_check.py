"""install() and the self-check: the kernel's real module in a real child process.

A CPU stands in for the GPU. `hopper` claims to support it, so that `auto` wants to bind it; there its check
fails as soon as it launches.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console

import videoattn
from tests.pipelines import ltx_transformer
from tests.verdicts import forget
from videoattn import doctor
from videoattn.dispatch import choose
from videoattn.kernels import hopper, verify
from videoattn.kernels.verify import Subject, Verdict

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
RUNS = "runs its self-check"


@pytest.fixture
def no_verdicts(tmp_path, monkeypatch):
    return forget(tmp_path, monkeypatch)


@pytest.fixture
def eager_hopper(no_verdicts, monkeypatch):
    monkeypatch.setattr(hopper, "supports", lambda call: None)
    choose.cache_clear()
    yield no_verdicts
    choose.cache_clear()


def bound(handle):
    return {choice.kernel for choice in handle.receipt.choices.values()}


def test_a_kernel_that_fails_is_off_and_named(eager_hopper, caplog):
    failed = "'hopper' failed its self-check on cpu and is not used: the check ended with status 1"
    with pytest.warns(RuntimeWarning, match=failed):
        handle = videoattn.install(ltx_transformer())
    assert caplog.text.count(RUNS) == 1
    assert bound(handle) == {"sdpa"}
    assert "not hopper: it failed its self-check: the check ended" in str(handle.receipt)

    # Another process, or the next install: the verdict is remembered, and as loud.
    verify._known.clear()
    with pytest.warns(RuntimeWarning, match=failed):
        videoattn.install(ltx_transformer())
    assert caplog.text.count(RUNS) == 1


def test_a_kernel_that_passed_is_bound_at_once(eager_hopper, caplog):
    verify.remember(Subject.here("hopper", CPU), Verdict(True, "fine"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = videoattn.install(ltx_transformer())
        assert bound(handle) == {"hopper"}
    assert RUNS not in caplog.text


def test_by_name_there_is_a_warning_and_no_wait(eager_hopper, caplog):
    said = "'hopper' serves because it was asked for by name, but it has not passed its self-check here yet"
    with pytest.warns(RuntimeWarning, match=said):
        handle = videoattn.install(ltx_transformer(), kernels="hopper")
    assert bound(handle) == {"hopper"}
    assert RUNS not in caplog.text
    assert not list(eager_hopper.rglob("*.json"))


def test_without_a_verdict_auto_says_so(eager_hopper):
    q = torch.zeros(1, 4, 2, 64)
    choice = choose(videoattn.dispatch.AttentionCall.of(q, q))
    assert choice.kernel == "sdpa"
    assert choice.reasons["hopper"].startswith("it has not passed its self-check here yet")


@pytest.mark.slow
def test_two_processes_check_once(no_verdicts):
    code = (
        "import torch\nfrom videoattn.kernels import verify\n"
        "print(verify.ensure('hopper', torch.device('cpu')).passed)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=600) for process in pair]
    assert [out.strip() for out, _ in said] == ["False", "False"], said
    assert sum(RUNS in err for _, err in said) == 1
    assert len(list((no_verdicts / "verdicts").glob("*.json"))) == 1


@pytest.mark.slow
def test_doctor_verify_tells_what_could_not_run(no_verdicts, monkeypatch):
    """The parent believes in a GPU, the real child finds none: no verdict, nothing kept, status 1."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    out = io.StringIO()
    console = Console(file=out, width=200)
    assert doctor.verify_kernels(console) == 1
    said = out.getvalue()
    assert said.startswith("self-check of hopper on cuda:0: could not run, ")
    assert "blackwell" not in said
    assert not list(no_verdicts.rglob("*.json"))
