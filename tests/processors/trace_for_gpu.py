"""Trace the Triton ops for a GPU that is not here, as torch.compile does, and print which buffers each kernel
is found to write. `test_fused.py` starts this in a process of its own, since it replaces Triton's driver."""

from __future__ import annotations

import json

import torch
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from videoattn.processors import fused_kernels, residual_kernels  # noqa: F401


class Hopper:
    """What Triton asks of a driver when it only compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class Ops(torch.nn.Module):
    """Every op, with and without what it may go without."""

    def forward(self, x, weight, cos, logits, temb, short):
        ops = torch.ops.videoattn
        q, k = ops.norm_rotate(x, x, weight, weight, 1e-6, 1e-6, cos, cos)
        (text,) = ops.norm_rotate(ops.gate(q, logits), None, weight, None, 1e-6, 0.0, None, None)
        parameter = [weight, temb]
        both = ops.residual_norm(text, k, parameter, True, None, 1e-6, 4 * parameter)
        (normed,) = ops.residual_norm(both[0], None, [], True, None, 1e-6, [])
        turned = ops.norm_rotate(x, k, weight, weight, 1e-6, 1e-6, cos, cos, cos, cos)
        plain = ops.norm_rotate(x, short, weight, weight, 1e-6, 1e-6, None, None)
        two = ops.residual_norm_pair(
            x, k, parameter, True, None, 1e-6, 4 * parameter, short, None, [], True, None, 1e-6, 4 * parameter
        )
        return (*two, *turned, *plain, *both, *ops.residual_norm(normed, k, parameter, False, None, 0.0, []))


assert not fused_kernels.INTERPRETED
driver.set_active(Hopper())
with FakeTensorMode(), torch.no_grad():

    def on_gpu(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    rows, heads = 300, 32
    angles = on_gpu(1, rows, heads, 64, dtype=torch.float32).swapaxes(1, 2)
    given = (
        on_gpu(1, rows, 4096),
        on_gpu(4096),
        angles,
        on_gpu(1, rows, heads),
        on_gpu(1, 1, 4096),
        on_gpu(1, 9, 4096),
    )
    graph, _ = aot_export_module(Ops(), given, trace_joint=False)
print(
    json.dumps(
        [
            sorted(node.kwargs["tensors_to_clone"])
            for node in graph.graph.nodes
            if "tensors_to_clone" in node.kwargs
        ]
    )
)
