"""Fewer launches for a forward: blocks compiled by region, and whole forwards replayed as CUDA graphs."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from types import MethodType
from typing import Any, Protocol

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch.utils import _pytree

from videoattn.dispatch import choose
from videoattn.processors.blocks import LTX2VideoTransformerBlock, blocks_of
from videoattn.processors.overlap import CudaLane, Lane, overlapping
from videoattn.processors.sites import models
from videoattn.processors.stack import state_of
from videoattn.processors.tree import Tree
from videoattn.processors.untouched import hooked
from videoattn.timing import recorder

# Each size and each mask form is a graph of its own; torch's default of 8 would end a long session.
RECOMPILE_LIMIT = 64
CONFLICT = (
    "CUDA graphs read weights where they lay at capture, and {what} moves or changes them: "
    "undo that, or do without cuda_graphs()"
)


def compile_blocks(target: Any, *, fullgraph: bool = True) -> None:
    """Compile a transformer's repeated blocks, one graph for each size and mask form, none for unknown sizes.

    After `install()`, or before: then the first forward after it compiles again. `fullgraph=False` is for
    spatio-temporal guidance, in which diffusers branches on a tensor.
    """
    transformer, _ = models(target)
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    transformer.compile_repeated_blocks(fullgraph=fullgraph, dynamic=False)


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class Capture(Protocol):
    """Something that records what a function does to the device, and does it again."""

    def record(self, run: Callable[[], Any]) -> Any:
        """Record `run`; its outputs, written anew by every replay."""
        ...

    def replay(self) -> None:
        """Do it again, on the current stream."""
        ...


class CudaCapture:
    """A CUDA graph in a memory pool that others may share, as long as one runs at a time."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
        self._device, self._stream, self._pool = device, stream, pool
        self._graph = torch.cuda.CUDAGraph()

    def record(self, run: Callable[[], Any]) -> Any:
        """Capture `run`, which must have run before: what a first run sets up cannot be captured."""
        with (
            torch.cuda.device(self._device),
            # torch has one capture stream for all devices; other threads, a server's, may go on meanwhile.
            torch.cuda.graph(
                self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            return run()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


def cuda_captures(device: torch.device) -> Callable[[], Capture]:
    """Makes captures that share one stream and one pool."""
    return functools.partial(CudaCapture, device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())


class _Captured:
    """One forward's graph: buffers for its tensors, its outputs, and the recording of what lies between.

    `calls` counts the attention calls in it that a recording of timings would have rows of.
    """

    def __init__(self, forward: Callable[..., Any], leaves: list[Any], spec: Any, capture: Capture) -> None:
        # Outside of inference mode, so that a later forward may write them in any mode.
        with torch.inference_mode(False):
            self._buffers = [
                torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
            ]
        self._fill(leaves)
        args, kwargs = _pytree.tree_unflatten(self._buffers, spec)
        self._capture = capture
        with recorder.unrecorded() as count:
            self._outputs = capture.record(lambda: forward(*args, **kwargs))
        self.calls = count.calls

    def _fill(self, leaves: list[Any]) -> None:
        for buffer, leaf in zip(self._buffers, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                buffer.copy_(leaf)

    def __call__(self, leaves: list[Any]) -> Any:
        self._fill(leaves)
        self._capture.replay()
        # The next replay overwrites the outputs.
        return _pytree.tree_map_only(torch.Tensor, torch.clone, self._outputs)


class ForwardGraphs:
    """The CUDA graphs of a transformer's forwards, made by `cuda_graphs`; `release()` undoes it.

    `captured` counts graphs, `replays` forwards that replayed one, `plain` those that ran as ever, by reason;
    `capture_seconds` is what the captures took together.
    """

    def __init__(
        self,
        model: Any,
        max_tokens: int | None,
        captures: Callable[[torch.device], Callable[[], Capture]] = cuda_captures,
        lanes: Callable[[torch.device], Lane] | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.replays = 0
        self.plain: Counter[str] = Counter()
        self.capture_seconds = 0.0
        self._model = model
        self._captures = captures
        self._lanes = lanes
        self._forward = model.forward
        self._own_forward = vars(model).get("forward")
        self._released = False
        # Whoever asks for the forward's parameters gets those of the model's own.
        self.__signature__ = _signature(model)
        self._tree: Tree | None = None
        self._graphs: dict[Any, _Captured] = {}
        self._seen: set[Any] = set()
        self._weights: Any = None
        self._code: Any = None
        self._new_capture: Callable[[], Capture] | None = None
        self._lane: Lane | None = None
        model.forward = self

    def __getstate__(self) -> dict[str, Any]:
        # A copy's model has modules of its own, perhaps on another device, and has run no forward yet.
        fresh = {"replays": 0, "plain": Counter(), "capture_seconds": 0.0, "_graphs": {}, "_seen": set()}
        unknown = dict.fromkeys(("_tree", "_weights", "_code", "_new_capture", "_lane"))
        return {**vars(self), **fresh, **unknown}

    @property
    def released(self) -> bool:
        """Whether `release()` was called, after which every forward runs as ever."""
        return self._released

    @property
    def captured(self) -> int:
        """How many graphs there are now."""
        return len(self._graphs)

    def release(self) -> None:
        """Give the transformer the forward back that it had, and the graphs' memory to the allocator."""
        # Where somebody has wrapped this object since, it stays below and only passes calls on.
        self._released = True
        if vars(self._model).get("forward") is self:
            if self._own_forward is None:
                del self._model.forward
            else:
                self._model.forward = self._own_forward
        self._drop()

    def _drop(self) -> None:
        self._graphs.clear()
        self._seen.clear()
        self._new_capture = self._lane = None

    def _tree_now(self) -> Tree:
        if self._tree is None or not self._tree.stands():
            self._tree = Tree(self._model)
        return self._tree

    def _drop_if_weights_changed(self, tree: Tree) -> None:
        weights = tree.modules, tree.adapters(), tree.addresses()
        if weights != self._weights:
            self._drop()
            self._weights = weights

    def _drop_if_code_changed(self, tree: Tree) -> None:
        # The chooser replaces `again` when it forgets which kernels it chose.
        code = tree.replaced_code(), choose.again
        if code != self._code:
            self._drop()
            self._code = code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward: the first of its kind runs plain, the second is captured, the rest replay."""
        if self._released:
            return self._forward(*args, **kwargs)
        recording = recorder.active()
        whole = recording if isinstance(recording, recorder.Recording) else None
        try:
            arguments = self.__signature__.bind(*args, **kwargs).arguments
        except TypeError:
            return self._run_plain("arguments that diffusers' forward does not take", args, kwargs)
        reason = self._refusal(arguments)
        if reason is None and whole is not None and whole.compare:
            reason = "shadow arms run beside single calls"
        if reason is not None:
            return self._run_plain(reason, args, kwargs)
        tree = self._tree_now()
        # Before the weights are asked for: a hook may move them in every forward, which suits a plain one.
        if tree.hooked():
            return self._run_plain("a hook is on a module", args, kwargs)
        self._drop_if_weights_changed(tree)
        self._drop_if_code_changed(tree)
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        key = _key(leaves, spec, self._model, tree)
        graph = self._graphs.get(key)
        if graph is None and key not in self._seen:
            # What a first run makes, compiled kernels and workspaces, must exist before a capture.
            self._seen.add(key)
            return self._run_plain("the first forward of its kind", args, kwargs)
        device = arguments["hidden_states"].device
        if graph is None:
            began = perf_counter()
            if self._new_capture is None:
                self._lane = None if self._lanes is None else self._lanes(device)
                self._new_capture = self._captures(device)
            with overlapping(self._lane):
                graph = _Captured(self._forward, leaves, spec, self._new_capture())
            self._graphs[key] = graph
            self.capture_seconds += perf_counter() - began
        self.replays += 1
        with nullcontext() if whole is None else whole.forward(device, replayed_calls=graph.calls):
            return graph(leaves)

    def _run_plain(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.plain[reason] += 1
        return self._forward(*args, **kwargs)

    def _refusal(self, arguments: dict[str, Any]) -> str | None:
        """None, or why this forward is no matter for a graph."""
        hidden_states = arguments["hidden_states"]
        tokens = hidden_states.shape[0] * hidden_states.shape[1]
        if self.max_tokens is not None and tokens > self.max_tokens:
            return f"more than {self.max_tokens} tokens"
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return "gradients are on"
        if getattr(self._model, "_parallel_config", None) is not None:
            return "the model's tokens are shared out over several ranks"
        if arguments.get("spatio_temporal_guidance_blocks") or arguments.get("perturbation_mask") is not None:
            return "spatio-temporal guidance branches on a tensor"
        # LTX-2 builds them from host memory, which a capture forbids; its pipelines hand them in.
        if "audio_coords" in self.__signature__.parameters and arguments.get("video_coords") is None:
            return "no video_coords were given"
        for value in _pytree.tree_leaves(arguments):
            if isinstance(value, torch.Tensor) and value.device != hidden_states.device:
                return f"an argument is on {value.device}"
        return None


def _signature(model: Any) -> inspect.Signature:
    """Of the model's forward; its class's where one of the user's own does not name all that this takes."""
    own = inspect.signature(model.forward)
    known = inspect.signature(MethodType(type(model).forward, model))
    return own if known.parameters.keys() <= own.parameters.keys() else known


def cuda_graphs(target: Any, *, max_tokens: int | None = None, overlap: bool = False) -> ForwardGraphs:
    """Replay a transformer's forwards as CUDA graphs, one for each set of shapes, dtypes and mask forms.

    Of each kind the first forward runs as ever and the second is captured, which launches nothing; later
    ones cost one launch. Results are those of the captured kernels, bit for bit. A recording of timings times
    these forwards whole. Graphs are made anew when weights moved, or adapters, modules or processors changed;
    while a hook is on a module forwards run as ever. Other state that Python code in a forward reads is as it
    was at capture. Activations of graphs live in a memory pool of their own until `release()`.

    Args:
        target: a pipeline or a transformer, as for `install()`, on its GPU; its blocks may be compiled.
        max_tokens: forwards of more tokens, batch times sequence, run as ever: launches do not bind them.
        overlap: in a graph the audio's part of a block runs beside the video's, which takes an LTX-2 model
            under `install(level="block")` whose blocks are not compiled.

    Raises:
        TypeError: `target` is no such model.
        RuntimeError: it is not on a GPU, or is offloaded, cast layer by layer, cached, sharded, compiled as a
            whole, or has graphs already; or `overlap` where blocks cannot.
    """
    model, _ = models(target)
    forward = vars(model).get("forward")
    if isinstance(forward, ForwardGraphs) and not forward.released:
        raise RuntimeError("this transformer's forwards are CUDA graphs already: release() those first")
    if next(model.parameters()).device.type != "cuda":
        raise RuntimeError("CUDA graphs need the transformer on an NVIDIA GPU: move it there first")
    if getattr(model, "_compiled_call_impl", None) is not None or model is not getattr(
        target, "transformer", target
    ):
        raise RuntimeError(
            "the transformer is compiled as a whole: use mode='reduce-overhead' there, or compile_blocks()"
        )
    if getattr(model, "_parallel_config", None) is not None:
        raise RuntimeError("CUDA graphs of a model that enable_parallelism() sharded are not supported")
    _refuse_hooks(model)
    if overlap:
        require_overlap(model)
    return ForwardGraphs(model, max_tokens, lanes=CudaLane if overlap else None)


def require_overlap(model: Any) -> None:
    """Raise RuntimeError for a model whose blocks do not run their modalities side by side."""
    blocks = blocks_of(model)
    if not all(isinstance(block, LTX2VideoTransformerBlock) for block in blocks):
        raise RuntimeError("overlap takes an LTX-2 model's fused blocks: install(level='block') before it")
    wrapped = any(block is not given for block, given in zip(blocks, model.transformer_blocks, strict=True))
    if wrapped or any(block._compiled_call_impl is not None for block in blocks):
        raise RuntimeError(
            "overlap takes blocks that are not compiled: do without compile_blocks() or overlap"
        )


def _refuse_hooks(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if hooked(module):
            where = f"the hook on {name or type(model).__name__} (offloading, casting or a cache)"
            raise RuntimeError(CONFLICT.format(what=where))


def _key(leaves: list[Any], spec: Any, model: Any, tree: Tree) -> Any:
    """What a graph depends on besides the values in its buffers."""
    described = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    )
    return described, str(spec), _calls(model, tree), _switches()


def _calls(model: Any, tree: Tree) -> Any:
    """How the model's calls run now; equal for equal installs, none of which it keeps alive."""
    state = state_of(model)
    if not state:
        return tree.processors()
    layer, *forms = state
    return tree.processors(), layer.block_fusion and layer.block_fusion.under_compile, *forms


def _switches() -> tuple[Any, ...]:
    """What is set for the whole process or thread, and decides what operations a forward launches."""
    autocast = torch.is_autocast_enabled("cuda")
    return (
        autocast and torch.get_autocast_dtype("cuda"),
        torch.backends.cuda.matmul.fp32_precision,
        _AttentionBackendRegistry.get_active_backend()[0],
    )
