"""Which token streams of a model the ranks share out: the video's; sound and text are whole on every rank.

Splitting the video alone needs no padding of the sound's odd lengths (259 tokens for 249 frames), leaves
text, sound and audio-to-video calls without any communication, and lets video-to-audio calls send partial
results in place of the video's keys. Its price is the sound's own work on every rank: counted in matrix FLOPs
under 0.1 % of a 1536×1024 forward, 2 % of a 384×256 one.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.hooks.context_parallel import (
    ContextParallelGatherHook,
    ContextParallelSplitHook,
    apply_context_parallel,
)
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

from videoattn.dispatch import AttentionCall
from videoattn.processors.parallel.attention import (
    Groups,
    gather,
    present,
    share,
    split_attention,
)
from videoattn.processors.parallel.degrees import refuse_heads

# Arguments of the transformers that may hold one entry for each video token, in dimension 1.
PER_TOKEN = ("hidden_states", "timestep", "video_keyframes_mask")
VIDEO_QUERIES = ("video_self", "video_text", "audio_to_video")
VIDEO_KEYS = ("video_self", "video_to_audio")


class Streams:
    """The part of one transformer's tokens that this rank computes; everything, until `enable` or `adopt`.

    While it is enabled, hooks split the video at the model's entry and gather it at the exit. diffusers' own
    plan, which also splits text and its mask and knows no sound, is put aside and comes back with `release`.
    Every processor holds it, so it holds no model, which would come along with a copy of a single block.
    """

    def __init__(self) -> None:
        self.config: Any = None
        self.groups: Groups | None = None
        self.tokens = 0
        self._hooks: list[Any] = []
        self._stock: list[tuple[Any, str, Any]] | None = None

    def enable(self, model: Any, config: Any) -> None:
        """What diffusers' `enable_parallelism(config=config)` does, with this plan in place of the model's.

        The mesh lies on the device the model computes on, which may be the CPU.

        Raises:
            RuntimeError: parallel already, not a context-parallel config, caching on, or no process group.
            ValueError: the heads or the number of ranks do not fit the degrees.
        """
        from videoattn.processors.sites import execution_device

        if model._parallel_config is not None:
            raise RuntimeError(f"parallelism is already enabled on this {type(model).__name__}")
        if isinstance(config, ContextParallelConfig):
            config = ParallelConfig(context_parallel_config=config)
        require_supported(model, config)
        degrees: Any = config.context_parallel_config
        if not dist.is_initialized():
            raise RuntimeError(
                "context parallelism needs torch.distributed: start the ranks by torchrun and call "
                "init_process_group() first"
            )
        ranks = degrees.ring_degree * degrees.ulysses_degree
        if degrees.mesh is None and dist.get_world_size() != ranks:
            raise ValueError(
                f"ring_degree {degrees.ring_degree} × ulysses_degree {degrees.ulysses_degree} is {ranks} "
                f"ranks, and {dist.get_world_size()} are running"
            )
        device = execution_device(model)
        mesh = degrees.mesh or dist.init_device_mesh(
            device.type, degrees.mesh_shape, mesh_dim_names=degrees.mesh_dim_names
        )
        config.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
        model._parallel_config = config
        self._start(model, config)

    def adopt(self, model: Any) -> None:
        """Take over from `enable_parallelism()`, if it was called before videoattn was installed."""
        config = model._parallel_config
        if config is None:
            return
        require_supported(model, config)
        self._stock = _stock_hooks(model)
        for registry, name, _ in self._stock:
            registry.remove_hook(name, recurse=False)
        self._start(model, config)

    def release(self, model: Any) -> None:
        """Give the model back to diffusers' plan; a model that is not parallel is left as it is."""
        if self.config is None:
            return
        config, self.config, self.groups = self.config, None, None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._stock is not None:
            for registry, name, hook in self._stock:
                registry.register_hook(hook, name)
            return
        for module in model.modules():
            processor: Any = getattr(module, "processor", None)
            if hasattr(processor, "_parallel_config"):
                processor._parallel_config = config
        apply_context_parallel(model, config.context_parallel_config, type(model)._cp_plan)

    def _start(self, model: Any, config: Any) -> None:
        self.config = config
        self.groups = Groups.of(config.context_parallel_config)
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._hooks.append(model.register_forward_pre_hook(self._split_inputs, with_kwargs=True))
        if hasattr(model, "cross_attn_rope"):
            # LTX-2 hands coordinates to its embeddings, and those of a part need no more.
            for rope in (model.rope, model.cross_attn_rope):
                self._hooks.append(rope.register_forward_pre_hook(self._split_coordinates))
        else:
            self._hooks.append(model.rope.register_forward_hook(self._split_embeddings))
        self._hooks.append(model.proj_out.register_forward_hook(self._gather_output))

    def _split_inputs(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _refuse_caching(model)
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        self.tokens = given["hidden_states"].shape[1]
        split = {}
        for name in PER_TOKEN:
            value = given.get(name)
            if value is not None and value.dim() > 1 and value.shape[1] == self.tokens:
                split[name] = self._part(value, 1)
        args = tuple(split.pop(name, value) for name, value in zip(self._parameters, args, strict=False))
        return args, kwargs | split

    def _split_coordinates(self, _module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._part(args[0], 2), *args[1:])

    def _split_embeddings(self, _module: Any, _args: Any, output: Any) -> Any:
        return tuple(self._part(each, 1) for each in output)

    def _part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens; where the sequence ends inside, zeros follow."""
        assert self.groups is not None
        size = share(self.tokens, self.groups.whole.size())
        start = self.groups.whole.rank() * size
        count = present(self.tokens, start, size)
        part = whole.narrow(dim, start if count else 0, count)
        behind = whole.dim() - 1 - dim
        return F.pad(part, (0, 0) * behind + (0, size - count)) if count < size else part

    def _gather_output(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        assert self.groups is not None
        return gather(output, self.groups.whole).movedim(0, 1).flatten(1, 2)[:, : self.tokens]

    def splits(self, kind: str) -> bool:
        """Whether calls of this kind meet keys that other ranks hold."""
        return self.groups is not None and kind in VIDEO_KEYS

    def kv_len(self, kind: str, held: int) -> int:
        """Number of keys of the whole call, of which this rank holds `held`."""
        return self.tokens if self.splits(kind) else held

    def rows(self, kind: str, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a dense mask `(…, q_len or 1, kv_len)` that concerns this rank's queries."""
        if mask is None or self.groups is None or kind not in VIDEO_QUERIES or mask.shape[-2] == 1:
            return mask
        return self._part(mask, mask.dim() - 2)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        kernel: str,
        kind: str,
    ) -> torch.Tensor:
        """A call that `splits`: this rank's queries, or all of the sound's, against every rank's keys."""
        assert self.groups is not None
        return split_attention(
            q, k, v, tokens=self.tokens, groups=self.groups, mask=mask, kernel=kernel, kind=kind
        )

    def local(self, call: AttentionCall) -> AttentionCall:
        """The call that a kernel meets on one rank in place of a call of the whole model."""
        if self.groups is None or call.kind not in (*VIDEO_QUERIES, *VIDEO_KEYS):
            return call
        ring, ulysses = self.groups.ring.size(), self.groups.ulysses.size()
        if call.kind == "video_self":
            size = share(call.q_len, ring)
            return replace(call, heads=call.heads // ulysses, q_len=size, kv_len=size, return_lse=ring > 1)
        if call.kind == "video_to_audio":
            return replace(call, kv_len=share(call.kv_len, ring * ulysses), return_lse=True)
        return replace(call, q_len=share(call.q_len, ring * ulysses))


def require_supported(model: Any, config: Any) -> None:
    """Raise RuntimeError or ValueError for a parallel config, None if there is none, that can't be served."""
    if config is None:
        return
    degrees = getattr(config, "context_parallel_config", None)
    if degrees is None or not hasattr(model, "proj_out"):
        raise RuntimeError(
            "videoattn serves context parallelism of the transformer, and no other: this "
            f"{type(model).__name__} was given a {type(config).__name__} without it"
        )
    refusal = refuse_heads(model.config.num_attention_heads, degrees.ulysses_degree)
    if refusal is not None:
        raise ValueError(refusal)
    _refuse_caching(model)


def _refuse_caching(model: Any) -> None:
    if model.is_cache_enabled:
        raise RuntimeError(
            "caching decides from a rank's own tokens which blocks to skip, and ranks that disagree wait for "
            "each other for ever: call disable_cache() under context parallelism"
        )


def _stock_hooks(model: Any) -> list[tuple[Any, str, Any]]:
    """diffusers' context-parallel hooks on a model, as `(registry, name, hook)`."""
    registries = (getattr(module, "_diffusers_hook", None) for module in model.modules())
    return [
        (registry, name, hook)
        for registry in registries
        if registry is not None
        for name, hook in registry.hooks.items()
        if isinstance(hook, (ContextParallelSplitHook, ContextParallelGatherHook))
    ]
