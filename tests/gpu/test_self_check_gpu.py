"""The self-check on a GPU: what passes is bound, and what hangs or faults there costs the child alone."""

from __future__ import annotations

import pytest
import torch

from tests.verdicts import forget
from videoattn.dispatch import AttentionCall, choose
from videoattn.kernels import blackwell, hopper, verify
from videoattn.kernels.verify import Subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = torch.device("cuda", 0)
FAULTS = {
    "hanging": "torch.cuda._sleep(10**14)\n    torch.cuda.synchronize()",
    "asserting": "q[torch.tensor([1 << 40], device=q.device)].sum().item()",
}


@pytest.fixture
def no_verdicts(tmp_path, monkeypatch):
    forget(tmp_path, monkeypatch)
    choose.cache_clear()
    yield
    choose.cache_clear()


def test_what_passes_is_bound(no_verdicts):
    capability = torch.cuda.get_device_capability(DEVICE)
    names = [
        name
        for name, kernel in (("hopper", hopper), ("blackwell", blackwell))
        if capability in kernel.CAPABILITIES
    ]
    if not names:
        pytest.skip("needs a Hopper or Blackwell GPU")
    call = AttentionCall(1, 4, 300, 300, 128, torch.bfloat16, "cuda", capability)
    assert choose(call).kernel == "sdpa"
    assert verify.settle([("auto", call)], DEVICE)
    choose.cache_clear()
    verdict = verify.recall(Subject.here(names[0], DEVICE))
    assert verdict is not None
    assert verdict.passed, verdict.detail
    assert choose(call).kernel == names[0]
    assert not verify.settle([("auto", call)], DEVICE)


@pytest.mark.parametrize(
    ("fault", "timeout_s", "detail"), [("hanging", 40, "no answer within 40 s"), ("asserting", 300, "status")]
)
def test_a_fault_costs_the_child_alone(tmp_path, monkeypatch, fault, timeout_s, detail):
    before = torch.arange(1000, device=DEVICE)
    source = f"import torch\ndef run(q, k, v, **options):\n    {FAULTS[fault]}\n"
    (tmp_path / f"{fault}_kernel.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    verdict = verify.run_child(f"{fault}_kernel", str(DEVICE), timeout_s)
    assert not verdict.passed
    assert verdict.final
    assert detail in verdict.detail
    torch.cuda.synchronize()
    assert before.sum().item() == 499_500
