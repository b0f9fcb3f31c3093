"""The functional front door against an fp32 reference, its errors, and its behaviour under torch.compile."""

import math

import pytest
import torch

import videoattn
from videoattn.dispatch import KernelUnavailable


def reference(q, k, v, scale=None, kv_lengths=None):
    """fp32 attention and LSE, one batch entry at a time so that lengths are slices, not masks."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    outs, lses = [], []
    for b in range(q.shape[0]):
        n = k.shape[1] if kv_lengths is None else int(kv_lengths[b])
        scores = torch.einsum("qhd,khd->hqk", q[b].float(), k[b, :n].float()) * scale
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[b, :n].float()))
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(outs), torch.stack(lses)


def inputs(batch=2, q_len=37, kv_len=53, heads=3, head_dim=64, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(batch, n, heads, head_dim) for n in (q_len, kv_len, kv_len)]
    return [torch.randn(s, dtype=dtype) + 0.5 for s in shapes]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lengths", [None, [53, 1], [17, 0]])
def test_matches_fp32(scale, lengths):
    q, k, v = inputs()
    kv_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    if lengths is not None:
        for b, n in enumerate(lengths):
            k[b, n:], v[b, n:] = torch.nan, torch.inf
    out, lse = videoattn.attention(q, k, v, scale=scale, kv_lengths=kv_lengths, return_lse=True)
    ref, ref_lse = reference(q, k, v, scale, kv_lengths)
    torch.testing.assert_close(out, ref.nan_to_num(0.0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, ref_lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out, videoattn.attention(q, k, v, scale=scale, kv_lengths=kv_lengths))


def test_lse_in_chunks(monkeypatch):
    from videoattn.kernels import sdpa

    monkeypatch.setattr(sdpa, "LSE_CHUNK", 7 * 2 * 3 * 53)
    q, k, v = inputs()
    _, lse = videoattn.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, reference(q, k, v)[1], atol=1e-4, rtol=1e-5)


def test_strided_views_of_a_fused_tensor():
    qkv = torch.randn(2, 40, 3, 4, 64)
    q, k, v = qkv.unbind(2)
    torch.testing.assert_close(videoattn.attention(q, k, v), reference(q, k, v)[0], atol=1e-5, rtol=1e-5)


def test_compiles_fullgraph():
    q, k, v = inputs()
    lengths = torch.tensor([5, 9], dtype=torch.int32)

    def f(q, k, v, lengths):
        out, lse = videoattn.attention(q * 2, k, v, kv_lengths=lengths, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(q, k, v, lengths), f(q, k, v, lengths), strict=True):
        torch.testing.assert_close(got, want)


def test_op_registration_is_sound():
    q, k, v = inputs()
    args = (q, k, v, 0.125, None, None, True, "sdpa", "video_self")
    torch.library.opcheck(
        torch.ops.videoattn.attention.default, args, test_utils=("test_schema", "test_faketensor")
    )


def test_requires_grad_is_refused():
    q, k, v = inputs()
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        videoattn.attention(q, k, v)
    with torch.no_grad():
        videoattn.attention(q, k, v)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v, {}), "batch, seq, heads, head_dim"),
        (lambda q, k, v: (q, k, v[:, :-1], {}), "one shape"),
        (lambda q, k, v: (q[:, :, :2], k, v, {}), "grouped-query"),
        (lambda q, k, v: (q.half(), k, v, {}), "one dtype"),
        (lambda q, k, v: (q[:, :0], k, v, {}), "empty"),
        (lambda q, k, v: (q, k, v, {"kv_lengths": torch.tensor([1, 2])}), "int32"),
        (lambda q, k, v: (q, k, v, {"kernel": "flash9"}), "choose from auto, blackwell"),
    ],
)
def test_bad_arguments_name_the_fault(change, message):
    q, k, v, options = change(*inputs())
    with pytest.raises(ValueError, match=message):
        videoattn.attention(q, k, v, **options)


@pytest.mark.parametrize("kernel", ["blackwell", "hopper", "flash4", "flash3"])
def test_a_named_kernel_never_falls_back(kernel):
    with pytest.raises(KernelUnavailable, match=f"'{kernel}' cannot serve"):
        videoattn.attention(*inputs(), kernel=kernel)
