"""One forward of a full-width, few-layer LTX-2.3 over several GPUs of one host against one GPU.

Arms: one GPU, Ulysses over all ranks, the ring over all ranks. A time is that of the slowest rank of one
forward, from a barrier on, by CUDA events; random weights and inputs, the same on every rank. Equality is the
project's accuracy rule one level up: against a forward in fp32, an arm's largest error and relative L2 may be
twice those of one GPU. On a CPU the same runs with a tiny model through gloo against fp64, and its times mean
nothing.

    python scripts/bench_context_parallel.py --ranks 2 --json out.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

# A measurement must not put other users of a shared host at risk, and NVLink multicast concerns all its GPUs.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import videoattn
from videoattn.processors.parallel.degrees import Degrees

# What differs from the class's defaults in the released LTX-2.3.
RELEASED: dict[str, Any] = {
    "rope_type": "split",
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
    **dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True),
}
TINY: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 64,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 32,
}
TEXT_TOKENS = 1024


@dataclass(slots=True)
class Arm:
    """Times in seconds; errors against the precise forward, the larger of video and sound."""

    name: str
    seconds: list[float]
    max_error: float
    relative_l2: float
    equal: bool = True


def build(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    """The model on the device; every call makes the same weights."""
    from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
    from diffusers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(options.seed)
    config = RELEASED | ({} if device.type == "cuda" else TINY) | {"num_layers": options.layers}
    with torch.device(device):
        model: Any = LTX2VideoTransformer3DModel(**config)
    return model.to(dtype).eval()


def make_inputs(options: argparse.Namespace, model: Any, device: torch.device) -> dict[str, Any]:
    """One forward's arguments in fp32: video, sound of the same length, text without padding."""
    generator = torch.Generator(device).manual_seed(options.seed + 1)
    config = model.config
    frames, height, width = (options.frames - 1) // 8 + 1, options.height // 32, options.width // 32
    sound = round(options.frames / 24 * 25)
    text = TEXT_TOKENS if device.type == "cuda" else 16

    def draw(tokens: int, channels: int) -> torch.Tensor:
        return torch.randn(1, tokens, channels, device=device, generator=generator)

    return {
        "hidden_states": draw(frames * height * width, config.in_channels),
        "audio_hidden_states": draw(sound, config.audio_in_channels),
        "encoder_hidden_states": draw(text, config.cross_attention_dim),
        "audio_encoder_hidden_states": draw(text, config.audio_cross_attention_dim),
        "timestep": torch.full((1,), 500.0, device=device),
        "sigma": torch.full((1,), 500.0, device=device),
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": 24.0,
        "audio_num_frames": sound,
        "return_dict": False,
    }


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same with hidden states in a dtype."""
    return {
        name: value.to(dtype) if name.endswith("hidden_states") else value for name, value in inputs.items()
    }


def seconds_of(forward: Callable[[], Any], rounds: int, device: torch.device, *, alone: bool) -> list[float]:
    """Seconds of each forward on the slowest rank; `alone` where the others do nothing."""
    times = []
    for number in range(rounds + 2):
        if not alone:
            dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            forward()
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end) / 1e3
        else:
            began = perf_counter()
            forward()
            elapsed = perf_counter() - began
        if number >= 2:
            times.append(elapsed)
    if alone:
        return times
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def errors(outputs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Largest error and relative L2, the larger of video and sound; NaN where there is one."""
    largest = relative = 0.0
    for out, ref in zip(outputs, reference, strict=True):
        difference = out.to(ref.dtype) - ref
        largest = max(largest, difference.abs().max().item())
        relative = max(relative, (difference.norm() / ref.norm()).item())
        if bool(difference.isnan().any()):
            return float("nan"), float("nan")
    return largest, relative


@torch.no_grad()
def measure(options: argparse.Namespace, device: torch.device) -> list[Arm]:
    """All arms, in an initialised process group; rank 0 returns them, the others an empty list."""
    first, ranks = dist.get_rank() == 0, dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    arms: list[Arm] = []
    reference: list[torch.Tensor] = []
    model = build(options, device, dtype)
    inputs = make_inputs(options, model, device)
    if first:
        # It has the weights and inputs as the arms see them, rounded.
        precise = torch.float32 if device.type == "cuda" else torch.float64
        exact = build(options, device, dtype).to(precise)
        rounded = cast(cast(inputs, dtype), precise)
        videoattn.install(exact, kernels="sdpa")
        reference = list(exact(**rounded))
        del exact
    inputs = cast(inputs, dtype)
    for name in ("1 rank", f"ulysses:{ranks}", f"ring:{ranks}"):
        alone = name == "1 rank"
        if first or not alone:
            model = build(options, device, dtype)
            videoattn.install(model, kernels=options.attention)
            if not alone:
                share_out(model, Degrees.parse(name))
            outputs = model(**inputs)
            seconds = seconds_of(partial(model, **inputs), options.rounds, device, alone=alone)
            if first:
                arms.append(Arm(name, seconds, *errors(outputs, reference)))
        dist.barrier()
    for arm in arms:
        floor = torch.finfo(dtype).eps
        arm.equal = (
            arm.max_error <= 2 * arms[0].max_error + floor
            and arm.relative_l2 <= 2 * arms[0].relative_l2 + floor
        )
    return arms


def share_out(model: Any, degrees: Degrees) -> None:
    """Make the model parallel, as a render does."""
    from diffusers import ContextParallelConfig

    model.enable_parallelism(
        config=ContextParallelConfig(ulysses_degree=degrees.ulysses, ring_degree=degrees.ring)
    )


def report(
    options: argparse.Namespace, arms: list[Arm], device: torch.device, command: str
) -> dict[str, Any]:
    """What the table and the JSON file say."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "layers": options.layers,
        "size": f"{options.width}x{options.height}x{options.frames}",
        "attention": options.attention,
        "arms": [asdict(arm) for arm in arms],
    }


def print_table(said: dict[str, Any]) -> None:
    """One line an arm; speed-up is one rank's median over the arm's."""
    print(
        f"{said['date']}  {said['ranks']} x {said['device']}  torch {said['torch']}  LTX-2.3, "
        f"{said['layers']} layers, {said['size']}, attention {said['attention']}"
    )
    print(
        f"{'arm':<12} {'median ms':>10} {'quartiles':>19} {'speed-up':>9} {'max error':>10} {'rel. L2':>9}"
        "  equal"
    )
    base = statistics.median(said["arms"][0]["seconds"])
    for arm in said["arms"]:
        low, middle, high = statistics.quantiles(arm["seconds"], n=4)
        print(
            f"{arm['name']:<12} {middle * 1e3:>10.2f} {low * 1e3:>9.2f} {high * 1e3:>9.2f} "
            f"{base / middle:>8.2f}x {arm['max_error']:>10.2e} {arm['relative_l2']:>9.2e}  "
            f"{'yes' if arm['equal'] else 'NO'}"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"]
    )
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of this host, or processes on a CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=None)
    parser.add_argument("--height", type=int, default=None)
    parser.add_argument("--frames", type=int, default=None)
    parser.add_argument("--attention", default="auto", help="a kernel's name, or auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args(arguments)
    sizes = (1536, 1024, 249) if options.device == "cuda" else (128, 96, 17)
    for name, size in zip(("width", "height", "frames"), sizes, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, size)
    if options.ranks < 2:
        parser.error("--ranks: one rank shares nothing out, give at least 2")
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks {options.ranks}: this machine has {torch.cuda.device_count()} GPUs")
    return options


def work(rank: int, options: argparse.Namespace, store: str, command: str, outcome: str) -> None:
    """One rank's process; the first one prints, and leaves in `outcome` whether all arms were equal."""
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.ranks,
        device_id=device if device.type == "cuda" else None,
    )
    arms = measure(options, device)
    if rank == 0:
        said = report(options, arms, device, command)
        print_table(said)
        if options.json is not None:
            beside = options.json.with_name(options.json.name + ".part")
            beside.write_text(json.dumps(said, indent=1))
            os.replace(beside, options.json)
        Path(outcome).write_text("equal" if all(arm.equal for arm in arms) else "different")
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks; 0 where every arm is equal, 1 otherwise."""
    options = parse(sys.argv[1:])
    command = " ".join(["python", *sys.argv])
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome"
        torch.multiprocessing.spawn(
            work, (options, f"{folder}/store", command, str(outcome)), nprocs=options.ranks
        )
        return 0 if outcome.read_text() == "equal" else 1


if __name__ == "__main__":
    sys.exit(main())
