"""Which processors a model carries: the original ones, and those of every install still in force."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from videoattn.dispatch import Kind
from videoattn.processors import masks
from videoattn.processors.base import FUSED_PROJECTIONS, Processor
from videoattn.processors.levels import separate_projections
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

    @property
    def fused(self) -> bool:
        """Whether its level is above `call`."""
        return any(processor.fusion is not None for processor in self.processors.values())


class Stack:
    """The installs on one model; the last one that is still in force serves its calls.

    Lives on the model, so that several pipelines, and copies of the model, each find their own.
    """

    def __init__(self, model: Any, sites: list[Site]) -> None:
        self.layers: list[Layer] = []
        self.text_masks: dict[Kind, masks.TextMask] = {}
        self.originals: dict[Any, Any] = {}
        self.kinds: dict[Any, Kind] = {}
        self.streams: Streams | None = None
        self._fused_blocks = False
        self.meet(sites)
        try:
            self._hang_on(model, sites)
        except BaseException:
            self.dismantle(model)
            raise

    def _hang_on(self, model: Any, sites: list[Site]) -> None:
        for module, names, whole in _masks_of(model, sites):
            looked_at = {
                name: self.text_masks.setdefault(kind, masks.TextMask()) for name, kind in names.items()
            }
            masks.watch(module, looked_at, whole)
        if hasattr(model, "fuse_qkv_projections"):
            model.fuse_qkv_projections = _refuse_fusing
        if family(model) != CONNECTORS:
            self.streams = Streams()
            self.streams.adopt(model)
            model.enable_parallelism = EnableParallelism(model)

    def meet(self, sites: list[Site]) -> None:
        """Take note of the processors to go back to: those of the model's that are not ours now."""
        for site in sites:
            processor = site.module.processor
            self.kinds[site.module] = site.kind
            if not isinstance(processor, Processor):
                self.originals[site.module] = processor
            elif site.module not in self.originals:
                # A copy of a model made while videoattn was installed elsewhere has no original.
                self.originals[site.module] = site.processor.replaces()

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
        for name in ("fuse_qkv_projections", "enable_parallelism"):
            vars(model).pop(name, None)
        if self.streams is not None:
            self.streams.release(model)


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
    raise RuntimeError(FUSED_PROJECTIONS)


class EnableParallelism:
    """In place of a model's `enable_parallelism`; keeps no model alive, and a copied model has its own."""

    def __init__(self, model: Any) -> None:
        self._reference = weakref.ref(model)

    @property
    def _model(self) -> Any:
        return self._reference()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reference": self._model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _reference=weakref.ref(state["_reference"]))

    def __call__(self, *, config: Any, cp_plan: Any = None) -> None:
        """What diffusers' does, by our plan; raises as `Streams.enable` says."""
        if cp_plan is not None:
            raise ValueError("videoattn splits LTX models by a plan of its own: leave cp_plan out")
        streams: Streams = getattr(self._model, ATTRIBUTE).streams
        streams.enable(self._model, config)


def streams_of(model: Any) -> Streams | None:
    """Which tokens of the model this rank computes; None before the first install, and for connectors."""
    stack: Stack | None = vars(model).get(ATTRIBUTE)
    return None if stack is None else stack.streams


def state_of(model: Any) -> tuple[Any, ...]:
    """What decides how the model's calls run now: the install in force and the forms of its masks."""
    stack: Stack | None = vars(model).get(ATTRIBUTE)
    if stack is None:
        return ()
    return *stack.layers[-1:], tuple(mask.form for mask in stack.text_masks.values())


def push(model: Any, sites: list[Site], make: Callable[[Stack], Layer]) -> Layer:
    """Put an install, made for the model's stack, in force; one that fails leaves the model as it was."""
    with _lock:
        stack: Stack | None = vars(model).get(ATTRIBUTE)
        if stack is None:
            stack = Stack(model, sites)
            setattr(model, ATTRIBUTE, stack)
        else:
            stack.meet(sites)
        before = list(stack.layers)
        try:
            layer = make(stack)
            stack.layers.append(layer)
            stack.apply(model)
        except BaseException:
            stack.layers = before
            # A module that could not be given its new processor has its old one.
            with suppress(Exception):
                stack.apply(model)
            if not before:
                delattr(model, ATTRIBUTE)
                stack.dismantle(model)
            raise
        return layer


def in_force(model: Any, layer: Layer) -> bool:
    """Whether an install is on the model, alone or below a later one."""
    stack: Stack | None = vars(model).get(ATTRIBUTE)
    return stack is not None and layer in stack.layers


def remove(model: Any, layer: Layer | None = None) -> None:
    """Take an install away, wherever it lies, or all; after the last one the original processors are back.

    What is gone already is no error, so that one that failed half-way can be tried again.
    """
    with _lock:
        stack: Stack | None = vars(model).get(ATTRIBUTE)
        if stack is None:
            return
        stack.layers = [each for each in stack.layers if layer is not None and each is not layer]
        stack.apply(model)
        if not any(each.fused for each in stack.layers):
            separate_projections(stack.originals)
        if not stack.layers:
            delattr(model, ATTRIBUTE)
            stack.dismantle(model)
