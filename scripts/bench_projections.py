"""The projections of an LTX-2.3 block's attentions: a product each, and those of one tensor together.

    python scripts/bench_projections.py --tokens 3072 7040 12288 28160

Per attention and number of video tokens: microseconds a layer with a product each, with two (query and gates;
key and value) and, in self-attention, with one, and the share of elements in which the outputs differ.
Layers have weights of their own, so that none is in L2, and on a GPU are replayed as one CUDA graph, arms
interleaved, medians of rounds of some 60 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import denoise_models
import torch

from videoattn.processors.projections import lay_side_by_side, project
from videoattn.processors.sites import sites

LAYERS, ROUNDS, ROUND_SECONDS = 8, 6, 0.06
AUDIO_TOKENS = 259
# Rows up to which self-attention's four are one product, by arm; None: a product each.
ARMS: dict[str, int | None] = {"each": None, "two": 0, "one": sys.maxsize}


def replayed(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`run` as a CUDA graph; itself on a CPU."""
    run()
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def seconds(run: Callable[[], Any], count: int, device: torch.device) -> float:
    """Seconds of one run, over `count` back to back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / count


def bench(attentions: list[Any], x: torch.Tensor, source: torch.Tensor) -> tuple[dict[str, float], float]:
    """Microseconds a layer of each arm, and the share of elements in which together and apart differ."""
    runs, outputs = {}, {}
    for arm, rows in ARMS.items():
        if arm == "one" and source is not x:
            continue

        def layers(rows: int | None = rows) -> list[Any]:
            given: dict[str, Any] = {"together": rows is not None, "rows_of_one": rows or 0}
            return [project(attention, x, source, **given) for attention in attentions]

        outputs[arm] = torch.cat([part.flatten() for part in layers()[0] if part is not None])
        runs[arm] = replayed(layers, x.device)
    times: dict[str, list[float]] = {arm: [] for arm in runs}
    count = max(1, int(ROUND_SECONDS / seconds(runs["each"], 2, x.device)))
    for number in range(ROUNDS):
        for arm in list(runs) if number % 2 == 0 else reversed(runs):
            seconds(runs[arm], max(1, count // 3), x.device)
            times[arm].append(seconds(runs[arm], count, x.device))
    differ = max((output != outputs["each"]).float().mean().item() for output in outputs.values())
    return {arm: statistics.median(each) / len(attentions) * 1e6 for arm, each in times.items()}, differ


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[3072, 7040, 12288, 28160])
    parser.add_argument("--config", choices=["ltx2.3", "tiny"], default="ltx2.3")
    return parser.parse_args(arguments)


@torch.no_grad()
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = denoise_models.MODELS[options.config]
    layers = min(LAYERS, model.config.get("num_layers", LAYERS))
    model = replace(model, config={**model.config, "num_layers": layers})
    transformer = denoise_models.build(model, device, torch.bfloat16)
    kinds: dict[str, list[Any]] = {}
    for site in sites(transformer):
        lay_side_by_side(site.module)
        kinds.setdefault(site.kind, []).append(site.module)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {options.config}, {layers} layers, bf16")
    print(f"{'attention':16} {'rows':>11} {'each':>8} {'two':>8} {'one':>8} us a layer, differ")
    for tokens in options.tokens:
        lengths = {
            "video_self": (tokens, tokens),
            "video_text": (tokens, denoise_models.TEXT_TOKENS),
            "audio_self": (AUDIO_TOKENS, AUDIO_TOKENS),
            "audio_text": (AUDIO_TOKENS, denoise_models.TEXT_TOKENS),
            "audio_to_video": (tokens, AUDIO_TOKENS),
            "video_to_audio": (AUDIO_TOKENS, tokens),
        }
        for kind, attentions in kinds.items():
            rows, source_rows = lengths[kind]
            first = attentions[0]
            x = torch.randn(1, rows, first.to_q.in_features, device=device, dtype=torch.bfloat16)
            source = x
            if not kind.endswith("_self"):
                shape = (1, source_rows, first.to_k.in_features)
                source = torch.randn(shape, device=device, dtype=torch.bfloat16)
            times, differ = bench(attentions, x, source)
            cells = " ".join(f"{times[arm]:8.1f}" if arm in times else f"{'–':>8}" for arm in ARMS)
            print(f"{kind:16} {f'{rows}x{source_rows}':>11} {cells} {differ:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
