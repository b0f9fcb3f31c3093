"""Which processors a model carries: the original ones, and those of every install still in force."""

from __future__ import annotations

import threading
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from videoattn.dispatch import Kind
from videoattn.processors import masks
from videoattn.processors.base import FUSED, Processor
from videoattn.processors.parallel.streams import Streams
from videoattn.processors.sites import CONNECTORS, Site, family

if TYPE_CHECKING:
    from videoattn.processors.fused import Fusion

ATTRIBUTE = "_videoattn_installs"
_lock = threading.RLock()


class Layer:
    """One install's processors for one model, one per kind; `block_fusion` also runs its blocks, if given."""

    def __init__(self, processors: dict[Kind, Processor], block_fusion: Fusion | None = None) -> None:
        self.processors = processors
        self.block_fusion = block_fusion


class Stack:
    """The installs on one model; the last one that is still in force serves its calls.

    Lives on the model, so that several pipelines, and copies of the model, each find their own.
    """

    def __init__(self, model: Any, sites: list[Site]) -> None:
        self.layers: list[Layer] = []
        self.text_masks: dict[Kind, masks.TextMask] = {}
        # A copy of a model made while videoattn was installed elsewhere has no original to go back to.
        self.originals = {
            site.module: site.processor.replaces()
            if isinstance(site.module.processor, Processor)
            else site.module.processor
            for site in sites
        }
        self.kinds: dict[Any, Kind] = {site.module: site.kind for site in sites}
        self._fused_blocks = False
        for module, names, whole in _masks_of(model, sites):
            looked_at = {
                name: self.text_masks.setdefault(kind, masks.TextMask()) for name, kind in names.items()
            }
            masks.watch(module, looked_at, whole)
        if hasattr(model, "fuse_qkv_projections"):
            model.fuse_qkv_projections = _refuse_fusing
        self.streams: Streams | None = None
        if family(model) != CONNECTORS:
            self.streams = Streams(model)
            self.streams.adopt()
            # A method, so that a copy of the model gets one of its own.
            model.enable_parallelism = MethodType(_enable_parallelism, model)

    def apply(self, model: Any) -> None:
        """Give every attention module the processor that is now in force; leave a stranger's alone."""
        for module, original in self.originals.items():
            current = module.processor
            if current is original or isinstance(current, Processor):
                wanted = self.layers[-1].processors[self.kinds[module]] if self.layers else original
                module.set_processor(wanted)
        fusion = self.layers[-1].block_fusion if self.layers else None
        if fusion is not None or self._fused_blocks:
            from videoattn.processors import blocks

            self._fused_blocks = fusion is not None
            for block in blocks.blocks_of(model):
                blocks.apply(block, fusion)

    def dismantle(self, model: Any) -> None:
        """Undo what the constructor did to the model."""
        masks.unwatch(model)
        if self.streams is not None:
            self.streams.release()
        for name in ("fuse_qkv_projections", "enable_parallelism"):
            if name in vars(model):
                delattr(model, name)


def _masks_of(
    model: Any, sites: list[Site]
) -> list[tuple[torch.nn.Module, dict[str, Kind], torch.nn.Module]]:
    """The modules that receive text masks, the kind that each mask argument of theirs concerns, and the
    module whose forward meets these masks."""
    if family(model) == CONNECTORS:
        parts: list[tuple[Any, Kind]] = [
            (model.video_connector, "video_connector"),
            (model.audio_connector, "audio_connector"),
        ]
        # The first block: on the way there learnable registers replace the padding and its mask.
        return [
            (block, {"attention_mask": kind}, part)
            for part, kind in parts
            for block in part.transformer_blocks[:1]
        ]
    names: dict[str, Kind] = {
        "encoder_attention_mask": "video_text",
        "audio_encoder_attention_mask": "audio_text",
    }
    present = {site.kind for site in sites}
    return [(model, {name: kind for name, kind in names.items() if kind in present}, model)]


def _refuse_fusing(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(FUSED)


def _enable_parallelism(model: Any, *, config: Any, cp_plan: Any = None) -> None:
    if cp_plan is not None:
        raise ValueError("videoattn splits LTX models by a plan of its own: leave cp_plan out")
    streams: Streams = getattr(model, ATTRIBUTE).streams
    streams.enable(config)


def stack_of(model: Any, sites: list[Site]) -> Stack:
    """The model's stack, made at its first install."""
    with _lock:
        if ATTRIBUTE not in vars(model):
            setattr(model, ATTRIBUTE, Stack(model, sites))
        return getattr(model, ATTRIBUTE)


def streams_of(model: Any) -> Streams | None:
    """Which tokens of the model this rank computes; None before the first install, and for connectors."""
    stack: Stack | None = vars(model).get(ATTRIBUTE)
    return None if stack is None else stack.streams


def state_of(model: Any) -> tuple[Any, ...]:
    """What decides how the model's calls run now: the install in force and the forms of its masks."""
    stack: Stack | None = vars(model).get(ATTRIBUTE)
    if stack is None:
        return ()
    return stack.layers[-1], tuple(mask.form for mask in stack.text_masks.values())


def push(model: Any, layer: Layer) -> None:
    """Put an install in force."""
    with _lock:
        stack: Stack = getattr(model, ATTRIBUTE)
        stack.layers.append(layer)
        stack.apply(model)


def remove(model: Any, layer: Layer) -> None:
    """Take an install away, wherever it lies; after the last one the original processors are back."""
    with _lock:
        stack: Stack = getattr(model, ATTRIBUTE)
        stack.layers.remove(layer)
        stack.apply(model)
        if not stack.layers:
            stack.dismantle(model)
            delattr(model, ATTRIBUTE)
