"""A model's modules, gone through once, and what a recorded forward must ask of them before each replay.

Finding the modules takes many times as long as asking.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from videoattn.processors.base import Processor
from videoattn.processors.ltx import LTXVideoProcessor
from videoattn.processors.ltx2 import LTX2PerturbedProcessor, LTX2Processor
from videoattn.processors.untouched import wrapped

OURS: tuple[type[Processor], ...] = (LTXVideoProcessor, LTX2Processor, LTX2PerturbedProcessor)
# What `_describe` says of these is all there is to say.
KNOWN = (*OURS, *(ours.replaces for ours in OURS))


class Tree:
    """The modules that a model had when this was made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules: list[Any] = list(model.modules())
        self.attentions: list[Any] = [
            each for each in self.modules if hasattr(each, "get_processor") and hasattr(each, "to_q")
        ]
        self._adapted = _adapted(self.modules)
        # Attributes are slow to ask a module for where it has none.
        self._own = [vars(module) for module in self.modules]
        self._below = [own[name] for own in self._own for name in ("_modules", "_parameters") if own[name]]
        self._members = list(self._members_now())
        self._parameters = [each for each in self._members if isinstance(each, torch.nn.Parameter)]
        # Not the model's own, one of which looks at masks: they run around its forward.
        self._hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        for own in self._own[1:]:
            self._hooks += own["_forward_hooks"], own["_forward_pre_hooks"]

    def _members_now(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._below))

    def stands(self) -> bool:
        """Whether no module and no parameter was exchanged, added or taken away."""
        return sum(map(len, self._below)) == len(self._members) and all(
            map(operator.is_, self._members_now(), self._members)
        )

    def addresses(self) -> list[int]:
        """Where the weights lie."""
        return list(map(torch.Tensor.data_ptr, self._parameters))

    def adapters(self) -> list[Any]:
        """Which adapters act on the model, with which scales."""
        return [
            (
                module.disable_adapters,
                tuple(module.active_adapters),
                # peft's wrappers of whole modules pass questions on to what they wrap.
                module.merged if tuner else None,
                tuple(getattr(module, "scaling", {}).items()) if tuner else None,
            )
            for module, tuner in self._adapted
        ]

    def hooked(self) -> bool:
        """Whether a hook runs in the model's forward, or diffusers or accelerate have put one around it."""
        return any(self._hooks) or any(wrapped(own) for own in self._own if "forward" in own)

    def replaced_code(self) -> list[Any]:
        """What runs in the forward that no class says: modules' own forwards, strangers' processors."""
        forwards = [own["forward"] for own in self._own[1:] if "forward" in own]
        processors = [attention.processor for attention in self.attentions]
        return forwards + [each for each in processors if type(each) not in KNOWN]

    def processors(self) -> Hashable:
        """What the processors in force do; equal where equal ones are in force."""
        return tuple([_describe(attention.processor) for attention in self.attentions])


def _adapted(modules: list[Any]) -> list[tuple[Any, bool]]:
    """peft's layers and its wrappers of whole modules, and which are layers."""
    # A model can have none before peft is imported, which this would not do for nothing.
    tuners, wrappers = map(sys.modules.get, ("peft.tuners.tuners_utils", "peft.utils.other"))
    layer, wrapper = getattr(tuners, "BaseTunerLayer", ()), getattr(wrappers, "AuxiliaryTrainingWrapper", ())
    return [(each, isinstance(each, layer)) for each in modules if isinstance(each, (layer, wrapper))]


def _describe(processor: Any) -> Hashable:
    """Strangers are told apart by `Tree.replaced_code`."""
    backend = getattr(processor, "_attention_backend", None)
    parallel = getattr(processor, "_parallel_config", None) is not None
    if not isinstance(processor, Processor):
        return type(processor), backend, parallel
    engine = None if processor.fusion is None else processor.fusion.under_compile
    return type(processor), backend, parallel, processor.kind, processor.kernel, engine
