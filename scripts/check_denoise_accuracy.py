"""Whether a way to run the transformer stays within the noise floor of two stock backends.

For every seed the demo model renders a clip and a full-size transformer denoises random latents for some
steps, each several times: by a reference (stock, cuDNN), by a rival backend (FlashAttention-4 swapped in),
by control arms, which are stock but for their attention kernel, and by the arm in question. The arm passes
where PSNR(arm, reference) - PSNR(rival, reference), averaged over the seeds, is -1 dB or more, and where
its peak memory is at most 5 % above stock's (memory that CUDA graphs hold is printed apart). Beside the
mean stand its standard error and how many single seeds are within 1 dB: some clips answer any rounding by
several dB, so more seeds say more (`--clip-seeds`). The controls decide nothing; they say what an arm does
whose only difference is its attention kernel.

    python scripts/check_denoise_accuracy.py --arm block --config ltx2.3 --size 768x512
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import denoise_models
from bench_denoise import Arm

from videoattn.demo.model import DEFAULTS, load_pipeline

# In order of preference: a call that the first cannot take, a masked one, goes to the next.
BACKENDS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
    "sdpa": None,
}
MARGIN_DB = 1.0
MEMORY_MARGIN = 0.05
SIGMAS = (1.0, 0.725, 0.421875)


@contextmanager
def running(name: str, transformer: Any) -> Iterator[Any]:
    """The transformer run by a stock backend, or by an arm of bench_denoise.py; the value is its graphs."""
    if name not in BACKENDS:
        with Arm(name).active(transformer) as graphs:
            yield graphs
    elif (backends := BACKENDS[name]) is None:
        yield None
    else:
        with sdpa_kernel(backends, set_priority=True):
            yield None


def psnr(ours: torch.Tensor, reference: torch.Tensor, peak: float | None = None) -> float:
    """Decibels, of the peak or else of the reference's range; infinite where both are equal."""
    error = (ours.double() - reference.double()).square().mean().sqrt().item()
    if peak is None:
        peak = (reference.max() - reference.min()).item()
    return math.inf if error == 0 else 20 * math.log10(peak / error)


def encoded(pipe: Any) -> dict[str, torch.Tensor]:
    """The demo model's prompt, encoded once: the text encoder is not what differs."""
    embeds, mask, negative, negative_mask = pipe.encode_prompt(
        DEFAULTS["prompt"], DEFAULTS["negative_prompt"], device=pipe.transformer.device
    )
    return {
        "prompt_embeds": embeds,
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": negative,
        "negative_prompt_attention_mask": negative_mask,
    }


def clip(pipe: Any, prompt: dict[str, torch.Tensor], seed: int, steps: int) -> torch.Tensor:
    """Frames in [0, 1] of the demo model at its own settings."""
    settings = {name: value for name, value in DEFAULTS.items() if "prompt" not in name}
    settings |= {"num_inference_steps": steps, **prompt}
    generator = torch.Generator().manual_seed(seed)
    return pipe(**settings, generator=generator, output_type="pt").frames


def latents(transformer: Any, given: dict[str, Any], seed: int) -> torch.Tensor:
    """Video latents after Euler steps from noise, as a distilled model takes them."""
    generator = torch.Generator(transformer.device).manual_seed(seed)
    names = [name for name in ("hidden_states", "audio_hidden_states") if name in given]
    state = {name: torch.randn_like(given[name], dtype=torch.float32) for name in names}
    for value in state.values():
        value.normal_(generator=generator)
    for sigma, following in zip(SIGMAS, (*SIGMAS[1:], 0.0), strict=True):
        time = torch.full_like(given["timestep"], 1000 * sigma)
        call = {**given, "timestep": time, **({"sigma": time} if "sigma" in given else {})}
        call |= {name: value.to(transformer.dtype) for name, value in state.items()}
        for name, velocity in zip(names, transformer(**call), strict=True):
            state[name] += (following - sigma) * velocity.float()
    return state["hidden_states"]


def memory(arm: str, transformer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """GiB: peak of allocated memory in a forward, stock's and the arm's, and what the arm's graphs hold."""

    def peak() -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        transformer(**given)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**30

    stock = peak()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    with running(arm, transformer) as graphs:
        for _ in range(2):
            transformer(**given)
        ours = peak()
        torch.cuda.empty_cache()
        held = (torch.cuda.memory_reserved() - reserved) / 2**30 if graphs else 0.0
    fits = ours <= (1 + MEMORY_MARGIN) * stock
    print(
        f"peak memory: stock {stock:.2f} GiB, arm {ours:.2f} GiB ({ours / stock - 1:+.1%}), CUDA graphs hold "
        f"{held:.2f} GiB  {'ok' if fits else 'FAILED'}"
    )
    return {"stock_gib": stock, "arm_gib": ours, "graphs_hold_gib": held, "fits": fits}


def compare(
    transformer: Any, make: Any, names: list[str], seeds: range, peak: float | None
) -> dict[str, list[float]]:
    """For each name but the first, the reference, its PSNR against that for every seed."""
    reference: list[torch.Tensor] = []
    found: dict[str, list[float]] = {}
    for name in names:
        with running(name, transformer):
            made = [make(seed).cpu() for seed in seeds]
        if not reference:
            reference = made
        else:
            found[name] = [psnr(ours, theirs, peak) for ours, theirs in zip(made, reference, strict=True)]
    return found


def print_rows(title: str, found: dict[str, list[float]], rival: str, arm: str) -> bool:
    """Print the table of one kind of result; whether the arm passes."""
    print(title, flush=True)
    for seed in range(len(found[rival])):
        print(
            f"  seed {seed}: " + ", ".join(f"{name} {values[seed]:.2f} dB" for name, values in found.items())
        )
    print(
        "  mean:   "
        + ", ".join(f"{name} {statistics.fmean(values):.2f} dB" for name, values in found.items())
    )
    passed = False
    for name, values in found.items():
        if name == rival:
            continue
        behind = [_difference(a, b) for a, b in zip(values, found[rival], strict=True)]
        near = sum(difference >= -MARGIN_DB for difference in behind)
        mean = statistics.fmean(behind)
        # By torch: statistics.stdev takes no infinity.
        spread = torch.tensor(behind).std().item() if len(behind) > 1 else math.nan
        error = spread / math.sqrt(len(behind))
        print(
            f"  {name} - {rival}: {mean:+.2f} dB, standard error {error:.2f}, "
            f"{near} of {len(behind)} seeds at most {MARGIN_DB:g} dB below"
        )
        if name == arm:
            passed = mean >= -MARGIN_DB
    print(f"  {arm}: {'ok' if passed else 'FAILED'}")
    return passed


def _difference(a: float, b: float) -> float:
    # Both equal to the reference.
    return 0.0 if a == b else a - b


def main(arguments: list[str]) -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", default="block", help="an arm of bench_denoise.py")
    parser.add_argument("--reference", default="cudnn" if cuda else "sdpa")
    parser.add_argument("--rival", default="flash4" if cuda else "math")
    parser.add_argument("--controls", nargs="*", default=["call", "efficient"] if cuda else ["call"])
    parser.add_argument("--config", default="ltx2.3" if cuda else "tiny", choices=list(denoise_models.MODELS))
    parser.add_argument("--size", default="768x512" if cuda else "64x64", metavar="WxH")
    parser.add_argument("--frames", type=int, default=249 if cuda else 9)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--clip-seeds", type=int, metavar="SEEDS", help="for the clips, if others than --seeds"
    )
    parser.add_argument("--demo-steps", type=int, default=DEFAULTS["num_inference_steps"])
    parser.add_argument("--no-demo", action="store_true", help="leave out the demo model's clips")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    # The DSL under flash4 reads the command line.
    sys.argv = sys.argv[:1]
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    names = list(dict.fromkeys([options.reference, options.rival, *options.controls, options.arm]))
    seeds = range(options.seeds)
    clip_seeds = seeds if options.clip_seeds is None else range(options.clip_seeds)
    report: dict[str, Any] = {"arms": names, "device": str(device), "torch": torch.__version__}
    print(f"reference {options.reference}, rival {options.rival}, arm {options.arm}, {device}, {dtype}")
    passed = True
    with torch.no_grad():
        if not options.no_demo:
            pipe = load_pipeline(torch_dtype=dtype).to(device)
            pipe.set_progress_bar_config(disable=True)
            prompt = encoded(pipe)
            # The demo model has no audio to overlap with.
            mute = [name.removesuffix("+overlap") for name in names]
            report["clips"] = compare(
                pipe.transformer,
                lambda seed: clip(pipe, prompt, seed, options.demo_steps),
                mute,
                clip_seeds,
                1.0,
            )
            passed &= print_rows(
                "clips of the demo model, frames",
                report["clips"],
                options.rival,
                options.arm.removesuffix("+overlap"),
            )
            del pipe
        transformer = denoise_models.build(denoise_models.MODELS[options.config], device, dtype)
        width, height = (int(part) for part in options.size.split("x"))
        given = denoise_models.inputs(transformer, width, height, options.frames, 1)
        report["latents"] = compare(
            transformer, lambda seed: latents(transformer, given, seed), names, seeds, None
        )
        title = f"{options.config} {options.size}, latents of {len(SIGMAS)} steps"
        passed &= print_rows(title, report["latents"], options.rival, options.arm)
        if device.type == "cuda":
            report["memory"] = memory(options.arm, transformer, given)
            passed &= report["memory"]["fits"]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
