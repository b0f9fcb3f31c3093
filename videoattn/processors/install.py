"""`install(pipe)`: swap the attention processors of an LTX model, and put them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from videoattn import kernels as kernel_modules
from videoattn.dispatch import AttentionCall, KernelUnavailable, Kind, Receipt, choose
from videoattn.kernels import verify
from videoattn.processors.base import Processor
from videoattn.processors.levels import CALL, Level, fusion_for, join_projections, says
from videoattn.processors.parallel.streams import require_supported
from videoattn.processors.sites import Site, execution_device, nominal_call, parts, sites
from videoattn.processors.stack import Layer, Stack, in_force, push, remove, streams_of

if TYPE_CHECKING:
    from videoattn.processors.fused import Engine, Fusion

Kernels = str | Mapping[str, str]


def install(
    target: Any, kernels: Kernels = "auto", *, level: Level = CALL, under_compile: Engine = "triton"
) -> Handle:
    """Swap the attention processors of an LTX pipeline, or of its transformer, for videoattn's.

    Of a pipeline the text connectors are served too. A later install on the same model takes precedence until
    it is uninstalled. The model's config, the values of its weights and diffusers' attention backends are not
    touched. Above level `call` weights on a GPU change their place until the last such install is taken away:
    those of projections that read the same tensor lie side by side, for one product. A CUDA graph that was
    captured by hand before reads where they lay.

    The first install on a GPU, driver and build runs the self-check of the kernels that `auto` could bind, in
    child processes that end within two minutes; a kernel that fails it is named in a warning and not used.

    Args:
        target: a diffusers pipeline with an LTXVideoTransformer3DModel or LTX2VideoTransformer3DModel, or
            such a transformer; compiled or not, on any device, offloaded or cast layer by layer.
        kernels: a kernel's name or `auto` for every kind of call, or a mapping from kinds to such names;
            kinds it leaves out are `auto`.
        level: how much besides the attention calls is served: `call`, nothing, results are diffusers' bit for
            bit where the kernel's are; `attention`, QK norm, rotary embedding and head gates, fused; `block`,
            also residuals, norms, modulation and the feed-forward's GELU. Fused work needs Triton on a GPU; a
            CPU does the same by torch.
        under_compile: above `call`, what torch.compile is given: the Triton kernels as they are, or `torch`
            operations that it fuses itself.

    Returns:
        A handle, also a context manager, that uninstalls and tells which kernel serves what.

    Raises:
        TypeError: `target` is no such model.
        ValueError: an unknown kind, kernel or level, an attention processor or a forward that is not
            diffusers' own, fused projections, a norm or a block that the level does not know.
        KernelUnavailable: a kernel asked for by name cannot serve the model's calls; the message says why.
        RuntimeError: the model is parallel in a way that videoattn does not serve, or the level needs what is
            missing: Triton, or weights that stay in their place; the message says why.
    """
    found = [(part, sites(part)) for part in parts(target)]
    present: dict[Kind, None] = {site.kind: None for _, part_sites in found for site in part_sites}
    names = _kernel_names(kernels, tuple(present))
    for part, part_sites in found:
        require_supported(part, getattr(part, "_parallel_config", None))
        _require(names, _calls(part, part_sites))
    fusion = fusion_for(level, under_compile, found)
    _self_check(names, found)

    def layer(part_sites: list[Site], stack: Stack) -> Layer:
        processors: dict[Kind, Processor] = {
            site.kind: site.processor(
                site.kind, names[site.kind], stack.text_masks.get(site.kind), stack.streams, fusion
            )
            for site in part_sites
        }
        return Layer(processors, fusion if level == "block" else None)

    layers: list[tuple[Any, list[Site], Layer]] = []
    try:
        for part, part_sites in found:
            layers.append((part, part_sites, push(part, part_sites, partial(layer, part_sites))))
        if fusion is not None:
            join_projections(found)
    except BaseException:
        for part, _, pushed in layers:
            remove(part, pushed)
        raise
    return Handle(names, layers, level, fusion)


def uninstall(target: Any) -> None:
    """Undo every install on a pipeline's transformer and text connectors, or on a transformer alone.

    For where no handle is left: the cell that installed ran again, or the model is a copy of one that was
    installed. A target without installs is left as it is.

    Raises:
        TypeError: `target` is no such model.
    """
    for part in parts(target):
        remove(part)


class Handle:
    """One install in force; `uninstall()`, or leaving its `with` block, takes it away."""

    def __init__(
        self,
        kernels: dict[Kind, str],
        layers: list[tuple[Any, list[Site], Layer]],
        level: Level = CALL,
        fusion: Fusion | None = None,
    ) -> None:
        self.kernels = kernels
        self.level: Level = level
        self._layers = layers
        self._fusion = fusion
        self._models = " and ".join(type(model).__name__ for model, _, _ in layers)
        self._counts: Counter[Kind] = Counter(site.kind for _, part, _ in layers for site in part)
        # What it served, once the models are let go.
        self._served: tuple[dict[Kind, AttentionCall], str] | None = None
        self._entered = 0

    @property
    def installed(self) -> bool:
        """Whether this install is in force, alone or below a later one."""
        return any(in_force(model, layer) for model, _, layer in self._layers)

    @property
    def layers(self) -> dict[Kind, int]:
        """Attention calls of each kind in one forward of the transformer, or of the text connectors."""
        return dict(self._counts)

    @property
    def calls(self) -> dict[Kind, AttentionCall]:
        """For each kind the call its receipt describes: a typical clip's, on the model's current device."""
        if self._served is not None:
            return dict(self._served[0])
        calls: dict[Kind, AttentionCall] = {}
        for model, part, _ in self._layers:
            calls.update(_calls(model, part))
        return calls

    @property
    def receipt(self) -> Receipt:
        """For each kind the kernel that serves it on the model's current device, and why others do not."""
        choices = {kind: choose(call, self.kernels[kind]) for kind, call in self.calls.items()}
        return Receipt(choices, self.around)

    @property
    def around(self) -> str:
        """One phrase on what runs fused around the calls, and by what; empty at level `call`."""
        if self._served is not None:
            return self._served[1]
        served = [site for _, part, _ in self._layers for site in part]
        return says(self.level, self._fusion, execution_device(self._layers[0][0]), served)

    def uninstall(self) -> None:
        """Take this install away, and let go of the models.

        Their calls go to the latest install still in force, or else to the processors from before the first
        one, the same objects. A processor that someone else set meanwhile stays. The handle goes on telling
        what it served; a second call does nothing.
        """
        if self._served is None:
            self._served = self.calls, self.around
        for model, _, layer in self._layers:
            remove(model, layer)
        self._layers = []

    def __enter__(self) -> Handle:
        if not self.installed:
            raise RuntimeError("this install was undone: call install() again")
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        if not self._entered:
            self.uninstall()

    def __repr__(self) -> str:
        if not self.installed:
            return f"<videoattn, no longer on {self._models}>"
        kernels = ", ".join(f"{kind}={self.kernels[kind]}" for kind in self.layers)
        level = "" if self.level == CALL else f", level {self.level}"
        return f"<videoattn on {self._models}: {kernels}{level}>"


def _kernel_names(kernels: Kernels, kinds: tuple[Kind, ...]) -> dict[Kind, str]:
    wanted = dict.fromkeys(kinds, kernels) if isinstance(kernels, str) else dict(kernels)
    for kind, name in wanted.items():
        if kind not in kinds:
            raise ValueError(f"unknown kind of call '{kind}': this model has {', '.join(kinds)}")
        if name != "auto" and name not in kernel_modules.NAMES:
            raise ValueError(
                f"unknown attention kernel '{name}': choose from auto, {', '.join(kernel_modules.NAMES)}"
            )
    return {kind: wanted.get(kind, "auto") for kind in kinds}


def _calls(model: Any, part: list[Site]) -> dict[Kind, AttentionCall]:
    device, dtype = execution_device(model), model.dtype
    calls: dict[Kind, AttentionCall] = {site.kind: nominal_call(site, model, device, dtype) for site in part}
    streams = streams_of(model)
    return calls if streams is None else {kind: streams.local(call) for kind, call in calls.items()}


def _require(names: dict[Kind, str], calls: dict[Kind, AttentionCall]) -> None:
    """Raise KernelUnavailable where a kernel asked for by name cannot serve its kind."""
    for kind, call in calls.items():
        if names[kind] != "auto":
            try:
                choose(call, names[kind])
            except KernelUnavailable as error:
                hint = ""
                if call.device != "cuda":
                    hint = "; move the model to its GPU, or enable offloading, before install()"
                raise KernelUnavailable(f"{error}{hint}") from None


def _self_check(names: dict[Kind, str], parts: list[tuple[Any, list[Site]]]) -> None:
    """Let kernels that `auto` could bind here pass their self-check first, where none is remembered."""
    for model, part in parts:
        requests = [(names[kind], call) for kind, call in _calls(model, part).items()]
        if verify.settle(requests, execution_device(model)):
            choose.cache_clear()
