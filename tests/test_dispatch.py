"""What a remembered choice depends on besides the call."""

import pytest
import torch

from videoattn.dispatch import AttentionCall, KernelUnavailable, choose
from videoattn.kernels import reference

CALL = AttentionCall(1, 1, 8, 8, 64, torch.float32, "cuda", (9, 0))


@pytest.fixture
def tf32(monkeypatch):
    """Switches TF32 on, until the test ends."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    choose.cache_clear()
    yield lambda: setattr(matmul, "fp32_precision", "tf32")
    matmul.fp32_precision = before
    choose.cache_clear()


def test_tf32_that_is_switched_on_later_is_noticed(tf32):
    assert choose(CALL, "reference").kernel == "reference"
    assert "asked for by name" in choose(CALL).reasons["reference"]
    tf32()
    with pytest.raises(KernelUnavailable, match="TF32 is on"):
        choose(CALL, "reference")
    assert "TF32 is on" in choose(CALL).reasons["reference"]


def test_a_binding_notices_too(monkeypatch, tf32):
    real = reference.supports
    # As if these tensors were on a GPU.
    monkeypatch.setattr(reference, "supports", lambda call: real(CALL))
    q = torch.randn(1, 8, 1, 64)

    def bind(requested):
        return choose.bind(q, q, None, None, False, requested, "")

    bound, automatic = bind("reference"), bind("auto")
    assert bound.choice.kernel == "reference"
    assert bind("reference") is bound
    tf32()
    with pytest.raises(KernelUnavailable, match="TF32 is on"):
        bind("reference")
    assert bind("auto") is automatic
