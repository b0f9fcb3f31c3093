"""What the timing log costs: one LTX-2.3 denoise forward with and without it, interleaved pairs.

A transformer of the released widths and a few of its 48 layers, random weights; every size is measured as
pairs of forwards, one with a recording on and one without, their order turning from pair to pair. The table
gives the median of the pairs' differences. The last line times calls that the host bounds, where the
log costs most. With `--compare`, one more recording runs with shadow arms, and its report is printed.

    python scripts/measure_log_overhead.py --compare flash4 --json overhead.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel

import videoattn
from videoattn.attention import attend
from videoattn.dispatch import Kind
from videoattn.timing import TimingLog
from videoattn.timing.report import Report, summarise

# LTX-2.3's transformer where it differs from the constructor's defaults (the released config.json).
LTX_2_3 = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "rope_type": "split",
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
TEXT_TOKENS = 1024
FRAME_RATE = 24


def transformer(
    layers: int, heads: int, device: torch.device, dtype: torch.dtype
) -> LTX2VideoTransformer3DModel:
    """LTX-2.3's transformer with `layers` of its 48 blocks and `heads` of its 32 heads of 128 and 64."""
    torch.manual_seed(0)
    with device:
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = LTX2VideoTransformer3DModel(
                **LTX_2_3,
                num_layers=layers,
                num_attention_heads=heads,
                cross_attention_dim=128 * heads,
                audio_num_attention_heads=heads,
                audio_cross_attention_dim=64 * heads,
            )
        finally:
            torch.set_default_dtype(previous)
    return model.eval()


def inputs(model: LTX2VideoTransformer3DModel, width: int, height: int, frames: int) -> dict[str, Any]:
    """One sample's arguments for a forward; sizes in pixels and frames as a user gives them."""
    device, dtype = model.device, model.dtype
    grid = ((frames - 1) // 8 + 1, height // 32, width // 32)
    tokens, audio_tokens = grid[0] * grid[1] * grid[2], round(frames / FRAME_RATE * 25)
    config: Any = model.config
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return {
        "hidden_states": noise(1, tokens, config.in_channels),
        "audio_hidden_states": noise(1, audio_tokens, config.audio_in_channels),
        "encoder_hidden_states": noise(1, TEXT_TOKENS, config.cross_attention_dim),
        "audio_encoder_hidden_states": noise(1, TEXT_TOKENS, config.audio_cross_attention_dim),
        "timestep": torch.full((1, tokens), 909.0, device=device),
        "audio_timestep": torch.full((1, audio_tokens), 909.0, device=device),
        "sigma": torch.full((1,), 909.0, device=device),
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "fps": float(FRAME_RATE),
        "audio_num_frames": audio_tokens,
        "return_dict": False,
    }


def wait(device: torch.device) -> None:
    """Return when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run, device: torch.device) -> float:
    """Wall seconds of one call of `run`, from an idle device to an idle device."""
    wait(device)
    began = perf_counter()
    run()
    wait(device)
    return perf_counter() - began


def paired(run, device: torch.device, pairs: int) -> dict[str, Any]:
    """Seconds of `run` without and with the log, over pairs whose order turns."""

    def logged() -> float:
        # Opening and closing a recording is outside: a render does it once.
        with videoattn.record_timing() as recording:
            recording.enter(clip="overhead", stage="denoise")
            return seconds(run, device)

    plain_seconds, logged_seconds = [], []
    for pair in range(pairs):
        if pair % 2:
            logged_seconds.append(logged())
            plain_seconds.append(seconds(run, device))
        else:
            plain_seconds.append(seconds(run, device))
            logged_seconds.append(logged())
    differences = [b - a for a, b in zip(plain_seconds, logged_seconds, strict=True)]
    plain = statistics.median(plain_seconds)
    quartiles = statistics.quantiles(differences, n=4)
    return {
        "plain_ms": plain * 1e3,
        "logged_ms": statistics.median(logged_seconds) * 1e3,
        "overhead_ms": statistics.median(differences) * 1e3,
        "overhead": statistics.median(differences) / plain,
        "overhead_q1": quartiles[0] / plain,
        "overhead_q3": quartiles[2] / plain,
    }


def host_cost(device: torch.device, dtype: torch.dtype, pairs: int) -> dict[str, float]:
    """Seconds per call of calls so small that the host decides, without and with the log."""
    q = torch.randn(1, 64, 2, 64, device=device, dtype=dtype)
    calls = 200

    def run() -> None:
        for _ in range(calls):
            attend(q, q, q, kind="audio_self")

    seconds(run, device)
    result = paired(run, device, pairs)
    cost = {
        "plain_us": result["plain_ms"] * 1e3 / calls,
        "added_us": result["overhead_ms"] * 1e3 / calls,
    }
    if device.type == "cuda":
        cost["events_us"] = event_cost(device, pairs, calls) * 1e6 / calls
    return cost


def event_cost(device: torch.device, repeats: int, calls: int) -> float:
    """Median seconds of recording `calls` pairs of existing events: what no event clock can save."""
    stream = torch.cuda.current_stream(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]

    def run() -> None:
        for event in events:
            event.record(stream)

    seconds(run, device)
    return statistics.median(seconds(run, device) for _ in range(repeats))


def compared(
    model, arguments, layers: Mapping[Kind, int], compare: str, forwards: int
) -> tuple[TimingLog, Report]:
    """The log and report of `forwards` forwards with shadow arms, warmed up before."""
    with videoattn.record_timing(compare=compare):
        model(**arguments)
    with videoattn.record_timing(compare=compare) as recording:
        recording.enter(clip="overhead", stage="denoise", layers=layers)
        for step in range(forwards):
            recording.step = step
            model(**arguments)
    return recording.log, summarise(recording.log)


def main() -> int:
    """Measure, print, and fail when the log costs a forward more than `--limit`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (the model has 48)")
    parser.add_argument("--heads", type=int, default=32, help="heads of each modality (the model has 32)")
    parser.add_argument("--sizes", nargs="+", default=["384x256", "768x512", "1280x704"], help="WIDTHxHEIGHT")
    parser.add_argument("--frames", type=int, default=249)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--kernels", default="auto", help="the kernel that serves the calls")
    parser.add_argument("--compare", default="", help="shadow arms for the last table, joined by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=0.01, help="largest overhead allowed, of the forward")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the runs with shadow arms")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    name = torch.cuda.get_device_name(device) if on_cuda else f"CPU ({platform.machine()})"
    print(f"{name}, torch {torch.__version__}, LTX-2.3 widths, {arguments.layers} of 48 layers, {dtype}")

    sizes: dict[str, Any] = {}
    worst = 0.0
    with torch.inference_mode():
        model = transformer(arguments.layers, arguments.heads, device, dtype)
        with videoattn.install(model, kernels=arguments.kernels) as handle:
            print(handle.receipt)
            print("      size  tokens  plain ms logged ms   added        quartiles")
            for size in arguments.sizes:
                width, height = (int(part) for part in size.split("x"))
                given = inputs(model, width, height, arguments.frames)

                def run(given=given) -> None:
                    model(**given)

                for _ in range(3):
                    seconds(run, device)
                result = paired(run, device, arguments.pairs)
                worst = max(worst, result["overhead"])
                print(
                    f"{size:>10} {given['hidden_states'].shape[1]:>7} {result['plain_ms']:>9.2f} "
                    f"{result['logged_ms']:>9.2f} {result['overhead']:>7.2%} "
                    f"{result['overhead_q1']:>7.2%} {result['overhead_q3']:>7.2%}"
                )
                sizes[size] = result
                if arguments.compare:
                    log, report = compared(model, given, handle.layers, arguments.compare, 6)
                    print(report)
                    result["report"] = report.to_dict()
                    if arguments.logs:
                        log.write(arguments.logs / f"{size}.jsonl")
    host = host_cost(device, dtype, arguments.pairs)
    print(f"a call that the host bounds: {host['plain_us']:.1f} µs, the log adds {host['added_us']:.1f} µs")
    if on_cuda:
        print(f"of which recording two events: {host['events_us']:.1f} µs")
    if arguments.json:
        measured = {"device": name, "torch": torch.__version__, "layers": arguments.layers}
        arguments.json.write_text(json.dumps({**measured, "sizes": sizes, "host": host}, indent=1))
    verdict = "ok" if worst < arguments.limit else "MISSED"
    print(f"largest overhead {worst:.2%}, limit {arguments.limit:.2%}: {verdict}")
    return int(worst >= arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
