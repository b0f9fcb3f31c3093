"""The sm_103a build of the other instantiations: its exponentials all go to the MUFU."""

import pytest
import torch

from tests.blackwell.test_simulated import BF16, FP16, check, operands


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (64, FP16), (128, FP16)])
def test_tails_lengths_and_several_items(head_dim, dtype):
    q, k, v = operands(2, 140, 140, 1, head_dim, dtype)
    lengths = torch.tensor([0, 133], dtype=torch.int32)
    for b, n in enumerate(lengths.tolist()):
        k[b, n:] = v[b, n:] = float("nan")
    check(q, k, v, kv_lengths=lengths, grid=1, arch=103, schedule="random:7")
