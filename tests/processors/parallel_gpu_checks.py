"""What the ranks of tests/gpu/test_context_parallel_gpu.py run, one GPU each."""

from __future__ import annotations

import torch
import torch.distributed as dist

import videoattn
from tests.processors import parallel_checks as checks
from videoattn.dispatch import AttentionCall
from videoattn.kernels import accuracy, get
from videoattn.processors.parallel import attention

KERNELS = ("sdpa", "hopper", "blackwell")


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def groups_of(ulysses: int, ring: int) -> attention.Groups:
    return checks.groups_of(ulysses, ring, "cuda")


def on_device(inputs):
    return {k: v.to(device()) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def draw(tokens: int, seed: int, heads: int = 8, head_dim: int = 128) -> torch.Tensor:
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(1, tokens, heads, head_dim, device=device(), generator=generator).bfloat16()


def usable(call: AttentionCall) -> list[str]:
    """The kernels that this GPU has for a call."""
    return [name for name in KERNELS if get(name).supports(call) is None]


def self_attention(ulysses: int, ring: int, tokens: int) -> dict[str, str]:
    """For each kernel what the accuracy rule finds wrong with the whole output; nothing is an empty text."""
    groups = groups_of(ulysses, ring)
    q, k, v = (draw(tokens, seed) for seed in range(3))
    said = {}
    for name in usable(AttentionCall.of(q, k, return_lse=ring > 1, kind="video_self")):
        mine = (checks.part_of(t) for t in (q, k, v))
        out = checks.split(*mine, tokens, groups, "video_self", kernel=name)
        whole = attention.gather(out, groups.whole).movedim(0, 1).flatten(1, 2)[:, :tokens]
        errors = accuracy.compare(whole, None, q, k, v, scale=128**-0.5)
        said[name] = "" if errors.passed else str(errors)
    return said


def split_keys(tokens: int) -> dict[str, tuple[str, float]]:
    """The same for 259 queries of sound; also the sum of the output, to compare ranks."""
    groups = groups_of(dist.get_world_size(), 1)
    q, k, v = draw(259, 0, head_dim=64), draw(tokens, 1, head_dim=64), draw(tokens, 2, head_dim=64)
    said = {}
    for name in usable(AttentionCall.of(q, k, return_lse=True, kind="video_to_audio")):
        out = checks.split(
            q, checks.part_of(k), checks.part_of(v), tokens, groups, "video_to_audio", kernel=name
        )
        errors = accuracy.compare(out, None, q, k, v, scale=64**-0.5)
        said[name] = ("" if errors.passed else str(errors)), out.double().sum().item()
    return said


def forward(version: str, ulysses: int, ring: int, compiled: bool) -> float:
    """Largest difference from the whole model on this GPU, in fp32."""
    stock = checks.build(version).to(device())
    inputs = on_device(checks.inputs_of(version, [9]))
    whole = stock(**inputs)
    model = checks.build(version).to(device())
    videoattn.install(model, kernels="sdpa")
    model.enable_parallelism(config=checks.config(ulysses, ring))
    if compiled:
        model.compile_repeated_blocks(fullgraph=True)
    return max((a - b).abs().max().item() for a, b in zip(model(**inputs), whole, strict=True))


def adopted(version: str) -> float:
    """The same after diffusers' own `enable_parallelism`, before the install."""
    stock = checks.build(version).to(device())
    inputs = on_device(checks.inputs_of(version, [9]))
    whole = stock(**inputs)
    stock.enable_parallelism(config=checks.config(2))
    videoattn.install(stock, kernels="sdpa")
    return max((a - b).abs().max().item() for a, b in zip(stock(**inputs), whole, strict=True))


def benchmark(arguments: list[str]) -> list[tuple[str, bool]]:
    """The measuring script's arms and whether each is equal."""
    arms = checks.bench.measure(checks.bench.parse(arguments), device())
    return [(arm.name, arm.equal) for arm in arms]
