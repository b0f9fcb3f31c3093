"""What the ranks run; each function returns arrays or text, for the test to compare."""

from __future__ import annotations

import copy
import io
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FirstBlockCacheConfig
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig
from diffusers.pipelines.ltx.pipeline_ltx_image2video import LTXImageToVideoPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_image2video import LTX2ImageToVideoPipeline

import videoattn
from tests import pipelines
from tests.processors.calls import CountingBackend, recording
from videoattn.processors.parallel import attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_context_parallel as bench


def config(ulysses: int = 1, ring: int = 1) -> ContextParallelConfig:
    return ContextParallelConfig(ulysses_degree=ulysses, ring_degree=ring)


def build(version: str, **settings: Any) -> Any:
    return (
        pipelines.ltx_transformer(**settings)
        if version == "ltx"
        else pipelines.ltx2_transformer(version, **settings)
    )


def inputs_of(version: str, lengths: list[int] | None, *, batch: int = 1, frames: int = 3) -> dict[str, Any]:
    """Inputs of `frames` × 3 × 4 video tokens and an odd number of audio tokens."""
    inputs = (
        pipelines.ltx_inputs(lengths, batch=batch)
        if version == "ltx"
        else pipelines.ltx2_inputs(lengths, version=version, batch=batch)
    )
    generator = torch.Generator().manual_seed(5)
    inputs["hidden_states"] = torch.randn(batch, frames * 12, pipelines.LATENT_CHANNELS, generator=generator)
    return inputs | {"num_frames": frames}


def arrays(results: Any) -> list[np.ndarray]:
    return [each.numpy() for each in results]


def groups_of(ulysses: int, ring: int, device: str = "cpu") -> attention.Groups:
    degrees = config(ulysses, ring)
    mesh = dist.init_device_mesh(device, degrees.mesh_shape, mesh_dim_names=degrees.mesh_dim_names)
    degrees.setup(dist.get_rank(), dist.get_world_size(), torch.device(device), mesh=mesh)
    return attention.Groups.of(degrees)


def part_of(whole: torch.Tensor) -> torch.Tensor:
    """This rank's tokens; what the last ranks hold past the end is poison."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = attention.share(whole.shape[1], ranks)
    part = whole.new_full((whole.shape[0], size, *whole.shape[2:]), torch.nan)
    mine = whole[:, rank * size : (rank + 1) * size]
    part[:, : mine.shape[1]] = mine
    return part


def draw(batch: int, tokens: int, heads: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, heads, 16, generator=generator)


def self_attention(ulysses: int, ring: int, tokens: int, batch: int, masked: bool) -> np.ndarray:
    groups = groups_of(ulysses, ring)
    q, k, v = (draw(batch, tokens, seed=seed) for seed in range(3))
    # A row with a mean far from the others: its LSEs differ most from rank to rank.
    k[:, tokens // 2] *= 20
    mask = random_mask(batch, tokens, tokens) if masked else None
    out = split(part_of(q), part_of(k), part_of(v), tokens, groups, "video_self", mask)
    return attention.gather(out, groups.whole).movedim(0, 1).flatten(1, 2)[:, :tokens].numpy()


def split_keys(ulysses: int, ring: int, tokens: int, masked: bool) -> np.ndarray:
    groups = groups_of(ulysses, ring)
    q, k, v = draw(2, 7), draw(2, tokens, seed=1), draw(2, tokens, seed=2)
    mask = random_mask(2, 1, tokens) if masked else None
    return split(q, part_of(k), part_of(v), tokens, groups, "video_to_audio", mask).numpy()


def split(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens: int,
    groups: attention.Groups,
    kind: str,
    mask: torch.Tensor | None = None,
    kernel: str = "sdpa",
) -> torch.Tensor:
    return attention.split_attention(
        q, k, v, tokens=tokens, groups=groups, mask=mask, kernel=kernel, kind=kind
    )


def random_mask(batch: int, rows: int, columns: int) -> torch.Tensor:
    """An additive mask that leaves every row a key."""
    generator = torch.Generator().manual_seed(9)
    valid = torch.rand(batch, 1, rows, columns, generator=generator) < 0.6
    valid[..., 0] = True
    return torch.where(valid, 0.0, -10000.0)


def forward(
    version: str,
    ulysses: int,
    ring: int,
    lengths: list[int] | None,
    more: dict[str, Any],
    frames: int = 3,
    batch: int = 1,
) -> list[np.ndarray]:
    model = build(version)
    videoattn.install(model)
    model.enable_parallelism(config=config(ulysses, ring))
    return arrays(model(**inputs_of(version, lengths, frames=frames, batch=batch) | more))


@contextmanager
def an_accelerator():
    """diffusers counts accelerators before it makes a mesh, and divides by their number."""
    before = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = before


def hooks_of(model: Any) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (path, tuple(module._diffusers_hook.hooks))
        for path, module in model.named_modules()
        if hasattr(module, "_diffusers_hook") and module._diffusers_hook.hooks
    ]


def enabled_before(version: str) -> list[np.ndarray]:
    """diffusers' own `enable_parallelism`, then `install`, then back."""
    model = build(version)
    with an_accelerator():
        model.enable_parallelism(config=config(2))
    processors = {path: m.processor for path, m in model.named_modules() if hasattr(m, "get_processor")}
    before = hooks_of(model)
    assert len(before) == 3
    handle = videoattn.install(model)
    assert [names for _, names in hooks_of(model)] == []
    calls = handle.calls["video_self"]
    assert (calls.heads, calls.q_len, calls.kv_len) == (1, 12288, 12288)
    result = arrays(model(**inputs_of(version, [9])))
    handle.uninstall()
    assert hooks_of(model) == before
    assert all(model.get_submodule(path).processor is each for path, each in processors.items())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert "enable_parallelism" not in vars(model)
    return result


def uninstalled_after(version: str) -> str:
    """`install`, `enable_parallelism`, `uninstall`: the model is diffusers', parallel by diffusers' plan."""
    model = build(version)
    handle = videoattn.install(model)
    second = videoattn.install(model, kernels="sdpa")
    model.enable_parallelism(config=config(2))
    expected = handle.calls["video_to_audio"] if version != "ltx" else None
    assert expected is None or (expected.kv_len, expected.return_lse) == (6144, True)
    inputs = inputs_of(version, [9])
    first_results = model(**inputs)
    handle.uninstall()
    for one, two in zip(first_results, model(**inputs), strict=True):
        assert torch.equal(one, two)
    second.uninstall()
    parallel = model._parallel_config
    assert isinstance(parallel, ParallelConfig)
    for module in model.modules():
        if hasattr(module, "get_processor"):
            assert module.processor._parallel_config is parallel
    assert len(hooks_of(model)) == 3
    try:
        model(**inputs)
    except RuntimeError as error:
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    """The messages of everything that cannot be served, each on a model left untouched."""
    said = {}

    def refused(name: str, action: Any) -> None:
        try:
            action()
        except (RuntimeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    model = build("2.3")
    videoattn.install(model)
    refused("heads", lambda: model.enable_parallelism(config=config(4)))
    refused("ranks", lambda: model.enable_parallelism(config=config(2, 2)))
    refused("plan", lambda: model.enable_parallelism(config=config(2), cp_plan={}))
    refused("tensor", lambda: model.enable_parallelism(config=TensorParallelConfig(tp_degree=2)))
    assert model._parallel_config is None
    model(**inputs_of("2.3", None))

    other = build("ltx")
    other.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    videoattn.install(other)
    refused("cache", lambda: other.enable_parallelism(config=config(2)))
    other.disable_cache()
    other.enable_parallelism(config=config(2))
    refused("twice", lambda: other.enable_parallelism(config=config(2)))
    other.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    refused("cache later", lambda: other(**inputs_of("ltx", None)))

    behind = build("ltx")
    videoattn.install(behind)
    with an_accelerator():
        type(behind).enable_parallelism(behind, config=config(2))
    refused("behind", lambda: behind(**inputs_of("ltx", None)))

    wide = build("ltx")
    with an_accelerator():
        wide.enable_parallelism(config=config(1, 2))
        wide._parallel_config.context_parallel_config.ulysses_degree = 3
    refused("install", lambda: videoattn.install(wide))
    assert len(hooks_of(wide)) == 3
    assert not hasattr(wide, "_videoattn_installs")
    return said


def compiled(version: str) -> list[np.ndarray]:
    model = build(version)
    videoattn.install(model)
    model.enable_parallelism(config=config(1, 2))
    backend = CountingBackend()
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    result = arrays(model(**inputs_of(version, [9])))
    model(**inputs_of(version, [9]))
    assert backend.graphs == 1
    return result


def shapes(ulysses: int, ring: int) -> dict[str, tuple[int, ...]]:
    """Heads, q_len, kv_len and LSE of every kind of call, as the timing log sees them on this rank."""
    model = build("2.3")
    videoattn.install(model)
    model.enable_parallelism(config=config(ulysses, ring))
    with recording() as calls:
        model(**inputs_of("2.3", None))
    return {str(c.kind): (c.heads, c.q_len, c.kv_len, int(c.return_lse)) for c in calls.calls}


def pipeline(version: str, ulysses: int, ring: int, guided: bool, from_image: bool) -> list[np.ndarray]:
    """A whole clip; `ulysses` = `ring` = 1 is one process."""
    pipe = pipelines.ltx_pipeline() if version == "ltx" else pipelines.ltx2_pipeline(version)
    videoattn.install(pipe)
    if ulysses * ring > 1:
        pipe.transformer.enable_parallelism(config=config(ulysses, ring))
    more: dict[str, Any] = {}
    if from_image:
        pipe = (LTXImageToVideoPipeline if version == "ltx" else LTX2ImageToVideoPipeline).from_pipe(pipe)
        pipe.set_progress_bar_config(disable=True)
        more["image"] = torch.rand(1, 3, 96, 128, generator=torch.Generator().manual_seed(3))
        if version != "ltx":
            more["image_crf"] = 0
    if version == "ltx":
        return arrays([pipelines.call_ltx(pipe, **more)])
    return arrays(pipelines.call_ltx2(pipe, **more, **(pipelines.GUIDANCE_ON if guided else {})))


def copied() -> list[np.ndarray]:
    """A copy made before parallelism is its own: it stays on one rank, and can be made parallel by itself."""
    model = build("ltx")
    videoattn.install(model)
    twin = copy.deepcopy(model)
    twin.enable_parallelism(config=config(2))
    assert model._parallel_config is None
    return arrays([*model(**inputs_of("ltx", [9])), *twin(**inputs_of("ltx", [9]))])


def benchmark(arguments: list[str]) -> str:
    """The table of the measuring script."""
    options = bench.parse(arguments)
    arms = bench.measure(options, torch.device("cpu"))
    if dist.get_rank() > 0:
        return f"{len(arms)} arms"
    said = bench.report(options, arms, torch.device("cpu"), "python bench_context_parallel.py")
    text = io.StringIO()
    with redirect_stdout(text):
        bench.print_table(said)
    return text.getvalue()
