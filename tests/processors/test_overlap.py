"""The audio's work beside the video's: independent of it, in any order, and of tensors that stay."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import videoattn
from tests.pipelines import ltx2_inputs, ltx2_transformer, ltx_transformer
from tests.processors.test_regions import Rerun, ltx2_call
from videoattn.processors import regions
from videoattn.processors.overlap import both, overlapping

LAYERS = 2
SECTIONS = 4  # self-attention, text, the modalities' meeting, feed-forward


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


class Reads(TorchDispatchMode):
    """Storages that operations read and that none of them made."""

    def __init__(self):
        super().__init__()
        self.outside, self._own = {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._own:
                storage = leaf.untyped_storage()
                self.outside[storage._cdata] = StorageWeakRef(storage)
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.outside:
                self._own.add(leaf.untyped_storage()._cdata)
        return results


class Watched:
    """Notes what goes missing of that which a second stream may still be reading."""

    def __init__(self):
        self.sections = self.read = self.dropped = 0

    def run(self, main, beside):
        self.sections += 1
        with Reads() as reads:
            second = beside()
        first = main()
        self.read += len(reads.outside)
        self.dropped += sum(ref.expired() for ref in reads.outside.values())
        return first, second


class Late:
    """A second stream that the device comes to last."""

    def run(self, main, beside):
        first = main()
        return first, beside()


class Early:
    """A second stream that the device comes to first."""

    def run(self, main, beside):
        second = beside()
        return main(), second


def fused(version="2.3"):
    model = ltx2_transformer(version, layers=LAYERS)
    videoattn.install(model, level="block")
    return model


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize(
    "more",
    [{}, {"isolate_modalities": True}, {"spatio_temporal_guidance_blocks": [1]}],
    ids=["plain", "isolated", "stg"],
)
def test_the_order_is_free(version, more):
    model, call = fused(version), {**ltx2_inputs(version=version), **more}
    expected = model(**call)
    for lane in (Late(), Early(), Watched()):
        with overlapping(lane):
            results = model(**call)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_what_the_second_stream_reads_stays():
    model, watched = fused(), Watched()
    with overlapping(watched):
        model(**ltx2_call())
    assert watched.sections == SECTIONS * LAYERS
    assert watched.read > 10 * watched.sections
    assert watched.dropped == 0


def test_the_watch_sees_what_is_dropped():
    """The test above can fail."""
    watched, held = Watched(), [torch.ones(8)]
    watched.run(lambda: held.clear(), lambda: held[0] + 1)
    assert watched.dropped == 1


def test_only_a_graph_overlaps():
    model, watched = fused(), Watched()
    graphs = regions.ForwardGraphs(model, None, lambda device: Rerun, lanes=lambda device: watched)
    call = ltx2_call()
    expected = model(**call)
    assert watched.sections == 0
    results = [model(**call) for _ in range(3)]
    assert watched.sections == SECTIONS * LAYERS
    for each in results:
        assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))
    graphs.release()
    model(**call)
    assert watched.sections == SECTIONS * LAYERS


def test_a_lane_is_of_one_thread_and_ends():
    order = []

    def section():
        both(lambda: order.append("main"), lambda: order.append("beside"))

    def fail():
        with overlapping(Early()):
            section()
            thread = threading.Thread(target=section)
            thread.start()
            thread.join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    section()
    assert order == ["beside", "main", *("main", "beside") * 2]


def test_what_does_not_overlap_is_refused():
    for model in (ltx2_transformer(layers=1), ltx_transformer(layers=1)):
        with pytest.raises(RuntimeError, match="level='block'"):
            regions.require_overlap(model)
    video_only = ltx_transformer(layers=1)
    videoattn.install(video_only, level="block")
    with pytest.raises(RuntimeError, match="LTX-2"):
        regions.require_overlap(video_only)
    model = fused()
    model.transformer_blocks[0] = torch.compile(model.transformer_blocks[0])
    with pytest.raises(RuntimeError, match="not compiled"):
        regions.require_overlap(model)
    model = fused()
    regions.require_overlap(model)
    regions.compile_blocks(model)
    with pytest.raises(RuntimeError, match="not compiled"):
        regions.require_overlap(model)
