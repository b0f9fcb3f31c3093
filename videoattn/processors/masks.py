"""Which masks may be dropped or become key lengths: decided once per prompt, outside compiled code.

A pre-hook on the module that receives the masks looks at each new mask once and leaves the verdict in a
`TextMask`, which the processors of that kind share until the forward ends. Traced code reads the verdict as
a guarded constant, so each form costs one graph, and takes the lengths from the mask at hand, so a verdict
never carries values.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from videoattn.dispatch import MaskForm

# Where a watched module keeps its `Watch`.
ATTRIBUTE = "_videoattn_masks"
# diffusers writes −10000 (−9984 in bf16) and the connectors the dtype's minimum for a masked key.
MASKED_BIAS = -9000.0
REMEMBERED = 4
# Runs a module's hooks and its forward; its frame is on the stack for exactly as long as they run.
CALL = torch.nn.Module._call_impl.__code__


class TextMask:
    """The form of the masks that the calls of one kind meet in the forward that is running.

    `dense` outside of one, and until its mask was looked at: a mask nobody vouches for is honoured whole.
    """

    form: MaskForm = "dense"

    def __init__(self) -> None:
        # Of each forward that began: the ids of its frame and its module, and the form from before it.
        # A frame itself would keep the forward's tensors and the model alive.
        self._begun: list[tuple[int, int, MaskForm]] = []

    def __reduce__(self) -> tuple[type[TextMask], tuple[()]]:
        return TextMask, ()  # a copy made during a forward is not in it

    def begin(self, module: torch.nn.Module) -> None:
        """A forward of `module` begins, perhaps inside another one."""
        frame = _frame_of(module)
        # What has this frame's id is older than the frame, so it ended.
        self._settle(lambda entry: entry[0] != frame and _is_running(entry))
        self._begun.append((frame, id(module), self.form))

    def end(self, module: torch.nn.Module) -> None:
        """A forward of `module` ends, and what was known about its masks with it."""
        frame = _frame_of(module)
        self._settle(lambda entry: entry[0] != frame and _is_running(entry))

    @property
    def running(self) -> bool:
        """Whether a forward that `begin` saw is on this thread's stack.

        Not for traced code. One that left it without an `end` ends here: torch calls no hook where a forward
        was interrupted by a KeyboardInterrupt or another exception that is no `Exception`.
        """
        self._settle(_is_running)
        return bool(self._begun)

    def _settle(self, runs: Callable[[tuple[int, int, MaskForm]], bool]) -> None:
        while self._begun and not runs(self._begun[-1]):
            self.form = self._begun.pop()[2]


def _frame_of(module: torch.nn.Module) -> int:
    """Which call of `module` this hook of its is in."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_call(frame, id(module)):
            return id(frame)
        frame = frame.f_back
    return 0


def _is_running(entry: tuple[int, int, MaskForm]) -> bool:
    called, module, _ = entry
    frame = sys._getframe(1)
    while frame is not None:
        if id(frame) == called:
            # A later frame, of something else, may have the id of one that is gone.
            return _is_call(frame, module)
        frame = frame.f_back
    return False


def _is_call(frame: FrameType, module: int) -> bool:
    return frame.f_code is CALL and id(frame.f_locals.get("self")) == module


class Watch:
    """The masks that one module receives; `arguments` maps their names to positions and where forms go."""

    def __init__(self, arguments: Mapping[str, tuple[int, TextMask]]) -> None:
        self.arguments = dict(arguments)
        self._seen: list[tuple[weakref.ref[torch.Tensor], int, MaskForm]] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_seen": []}

    def forget(self) -> None:
        """Nothing is known about any mask."""
        for _, text_mask in self.arguments.values():
            text_mask.form = "dense"

    def forms(self, masks: Sequence[torch.Tensor]) -> list[MaskForm]:
        """The forms of the masks of one forward; what has to be read is read in one transfer.

        A mask seen before, or a part of it, is not read again while it is unchanged.
        """
        known: list[MaskForm | None] = [self._known(mask) for mask in masks]
        # Several kinds often share one mask.
        unknown = {id(mask): mask for mask, form in zip(masks, known, strict=True) if form is None}
        read: dict[int, MaskForm] = {}
        if unknown:
            read = dict(zip(unknown, classify_all(list(unknown.values())), strict=True))
        for key, mask in unknown.items():
            if not mask.is_inference():
                self._seen = [
                    (weakref.ref(mask), mask._version, read[key]),
                    *self._seen[: REMEMBERED - 1],
                ]
        return [read[id(mask)] if form is None else form for mask, form in zip(masks, known, strict=True)]

    def _known(self, mask: torch.Tensor) -> MaskForm | None:
        if mask.is_inference():
            return None  # no version counter: a change in place would go unnoticed
        for reference, version, form in self._seen:
            known = reference()
            if known is None or known._version != version:
                continue
            # Entries of a dense mask may have a better form of their own.
            if mask is known or (form != "dense" and _is_part(mask, known)):
                return form
        return None


def _is_part(mask: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether `mask` is a slice of `known` along the batch (guidance splits its batch by `chunk`)."""
    roots = [t if t._base is None else t._base for t in (mask, known)]
    if roots[0] is not roots[1] or mask.dtype != known.dtype or mask.dim() != known.dim():
        return False
    if mask.shape[1:] != known.shape[1:] or mask.stride() != known.stride() or known.stride(0) == 0:
        return False
    first, rest = divmod(int(mask.storage_offset() - known.storage_offset()), int(known.stride(0)))
    return rest == 0 and first >= 0 and first + mask.shape[0] <= known.shape[0]


def classify(mask: torch.Tensor) -> MaskForm:
    """The form of a text mask; reads the mask's values.

    `mask` is multiplicative `(batch, kv_len)`, 1 for a valid key, or an additive bias `(batch, 1, kv_len)` or
    `(batch, 1, 1, kv_len)`, 0 for a valid key. `none`: every key is valid. `kv_lengths`: at least one leading
    key is valid and the rest is masked, per batch entry. `dense`: anything else, and masks without values, on
    the meta device or fake.
    """
    return classify_all([mask])[0]


def classify_all(masks: Sequence[torch.Tensor]) -> list[MaskForm]:
    """`classify` of each mask, in one transfer from each device, since a transfer waits for all its work."""
    forms: list[MaskForm] = ["dense"] * len(masks)
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for index, mask in enumerate(masks):
        facts = _facts(mask)
        # Of a real mask too they are fake where a mode or a tracer makes them so.
        if not facts.is_meta and not is_fake(facts):
            by_device.setdefault(mask.device, {})[index] = facts
    for known in by_device.values():
        read = torch.stack(list(known.values())).tolist()
        for index, (all_valid, right_padded) in zip(known, read, strict=True):
            forms[index] = "none" if all_valid else "kv_lengths" if right_padded else "dense"
    return forms


def _facts(mask: torch.Tensor) -> torch.Tensor:
    """Whether every key is valid, and whether padding on the right is all that is masked: two booleans."""
    if mask.dim() == 2:
        valid, masked = mask == 1, mask == 0
    else:
        valid, masked = mask == 0, mask <= MASKED_BIAS
    if valid[0].numel() != valid.shape[-1]:
        every = valid.all()
        return torch.stack([every, torch.zeros_like(every)])
    valid, masked = valid.flatten(1), masked.flatten(1)
    is_prefix = valid[:, 0].all() & ~(valid[:, 1:] & ~valid[:, :-1]).any() & (valid | masked).all()
    return torch.stack([valid.all(), is_prefix])


def apply(form: MaskForm, mask: torch.Tensor, kv_len: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A bias as `(dense mask, key lengths)` by its form, without reading its values on the host.

    `mask` is `(batch, q_len or 1, kv_len)` or `(batch, 1, q_len or 1, kv_len)`; the dense mask broadcasts to
    `(batch, heads, q_len, kv_len)`, the lengths are int32 `(batch,)`.
    """
    if form == "none":
        return None, None
    if form == "kv_lengths":
        return None, (mask == 0).reshape(mask.shape[0], kv_len).sum(-1, dtype=torch.int32)
    return (mask if mask.dim() == 4 else mask[:, None]), None


def _forget_masks(module: torch.nn.Module, *_: Any) -> None:
    # Inlined into a larger graph there is no moment to look at values, and what is known may be out of date.
    getattr(module, ATTRIBUTE).forget()


def _outside_graphs(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, which torch.compile calls outside the graph of the module it compiles."""
    disable: Any = torch.compiler.disable
    outside = disable(hook, reason="reads the masks' values")
    torch.compiler.substitute_in_graph(outside, skip_signature_check=True)(_forget_masks)
    return outside


@_outside_graphs
def begin_forward(module: torch.nn.Module, _args: tuple[Any, ...]) -> None:
    """The pre-hook on the module whose forward a verdict lasts for."""
    for _, text_mask in getattr(module, ATTRIBUTE).arguments.values():
        text_mask.begin(module)


@_outside_graphs
def look_at_masks(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The pre-hook on the module that receives the masks."""
    seen: Watch = getattr(module, ATTRIBUTE)
    given = [
        (text_mask, kwargs.get(name, args[position] if position < len(args) else None))
        for name, (position, text_mask) in seen.arguments.items()
        # Else a connector's block called by itself: no end would take the verdict back.
        if text_mask.running
    ]
    present = [(text_mask, mask) for text_mask, mask in given if mask is not None]
    forms = seen.forms([mask for _, mask in present])
    for (text_mask, _), form in zip(present, forms, strict=True):
        text_mask.form = form


@_outside_graphs
def end_forward(module: torch.nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
    """The hook that a forward ends with, also where it fails."""
    for _, text_mask in getattr(module, ATTRIBUTE).arguments.values():
        text_mask.end(module)


def watch(
    module: torch.nn.Module, text_masks: Mapping[str, TextMask], whole: torch.nn.Module | None = None
) -> None:
    """Look at the masks that `module.forward` receives, by argument name, before each forward.

    What is found holds until that forward ends, or that of `whole`, of which `module` is a part. ValueError
    for a forward without such an argument.
    """
    whole = module if whole is None else whole
    parameters = list(inspect.signature(module.forward).parameters)
    for name in text_masks:
        if name not in parameters:
            raise ValueError(
                f"the forward of {type(module).__name__} has no parameter {name}: restore diffusers' own"
            )
    watch = Watch({name: (parameters.index(name), text_mask) for name, text_mask in text_masks.items()})
    for each in (module, whole):
        setattr(each, ATTRIBUTE, watch)
    watch.hooks = [
        whole.register_forward_pre_hook(begin_forward),
        module.register_forward_pre_hook(look_at_masks, with_kwargs=True),
        whole.register_forward_hook(end_forward, always_call=True),
    ]


def unwatch(model: torch.nn.Module) -> None:
    """Undo every `watch` of the model's modules."""
    for module in model.modules():
        watch: Watch | None = vars(module).pop(ATTRIBUTE, None)
        if watch is not None:
            watch.forget()
            for hook in watch.hooks:
                hook.remove()
