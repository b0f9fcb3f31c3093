"""How much of a difference between attention kernels is only how they round P, on a CPU.

A kernel rounds P to bf16 against a reference maximum of the row, and sums it in fp32. The policies here
differ in nothing else: `cudnn` and `flash4` follow the true maximum of the keys so far, in blocks of 128 and
192 keys (assumed, not read from the two); `ours` keeps a reference until a thread's share of a block sums to
more than 2^10; `ours+sum` is ours with the sum taken of the rounded P; `exact` does not round P. Two tables:
distances between the outputs of the demo model's self-attention calls over one clip, and PSNR of whole clips
against `cudnn`'s.

    python scripts/study_attention_rounding.py --seeds 8   # some minutes on two cores
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import check_denoise_accuracy as check

from videoattn.demo.model import DEFAULTS, load_pipeline

LOG2_E = math.log2(math.e)
TRUSTED_SUM = 2.0**10
# A thread has columns 2 t and 2 t + 1 of every eight, t from 0 to 3.
THREADS, COLUMNS = 4, 2

# Keys a block, whether references lag, whether the sum is of the rounded P.
POLICIES = {
    "cudnn": (128, False, False),
    "flash4": (192, False, False),
    "ours": (96, True, False),
    "ours+sum": (96, True, True),
}
EXACT = "exact"


def attention(policy: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of (batch, heads, tokens, head dim) in fp32, but for the rounding of P; in q's dtype."""
    scores = q.float() @ k.float().transpose(-1, -2) * (scale * LOG2_E)
    v = v.float()
    if policy == EXACT:
        return (torch.softmax(scores / LOG2_E, -1) @ v).to(q.dtype)
    size, lags, sum_rounded = POLICIES[policy]
    blocks = list(zip(scores.split(size, -1), v.split(size, -2), strict=True))
    reference = torch.full_like(scores[..., :1], -math.inf)
    out, total = torch.zeros_like(scores[..., :1] * v[..., :1, :]), torch.zeros_like(reference)
    # Ours begins with the block that holds the tail.
    for number, (score, value) in enumerate(reversed(blocks) if lags else blocks):
        moved = torch.maximum(reference, score.amax(-1, keepdim=True))
        if lags and number > 0:
            p = torch.exp2(score - reference)
            padded = F.pad(p, (0, -p.shape[-1] % (THREADS * COLUMNS)))
            share = padded.unflatten(-1, (-1, THREADS, COLUMNS)).sum((-3, -1)).amax(-1, keepdim=True)
            power = p.amax(-1, keepdim=True).log2().floor().clamp(min=0)
            moved = torch.where(share > TRUSTED_SUM, reference + power, reference)
        factor = torch.exp2(reference - moved)
        reference = moved
        p = torch.exp2(score - reference)
        rounded = p.to(q.dtype).float()
        out = out * factor + rounded @ value
        total = total * factor + (rounded if sum_rounded else p).sum(-1, keepdim=True)
    return (out / total).to(q.dtype)


class Rounding(TorchFunctionMode):
    """Serves unmasked attention calls by a policy; without one by `cudnn`'s, and adds up what separates all.

    `distances` holds of every policy the squared distance to fp32, to `cudnn`, and the squared norm.
    """

    def __init__(self, policy: str | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.distances: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention or kwargs.get("attn_mask") is not None:
            return function(*args, **kwargs)
        q, k, v = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
        scale = kwargs.get("scale") or q.shape[-1] ** -0.5
        if self.policy is None:
            self._add(q, k, v, scale)
        return attention(self.policy or "cudnn", q, k, v, scale)

    def _add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        outs = {name: attention(name, q, k, v, scale).double() for name in (EXACT, *POLICIES)}
        fp32 = attention(EXACT, q.float(), k.float(), v.float(), scale).double()
        for name, out in outs.items():
            sums = self.distances[name]
            sums[0] += (out - fp32).square().sum().item()
            sums[1] += (out - outs["cudnn"]).square().sum().item()
            sums[2] += fp32.square().sum().item()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--demo-steps", type=int, default=DEFAULTS["num_inference_steps"])
    options = parser.parse_args()
    with torch.no_grad():
        pipe = load_pipeline(torch_dtype=torch.bfloat16)
        pipe.set_progress_bar_config(disable=True)
        prompt = check.encoded(pipe)
        with Rounding() as rounding:
            check.clip(pipe, prompt, 0, options.demo_steps)
        print(f"torch {torch.__version__}; self-attention calls of one clip, relative L2 distance")
        print(f"{'policy':<10} {'to fp32':>10} {'to cudnn':>10}")
        for name, (error, apart, norm) in rounding.distances.items():
            print(f"{name:<10} {math.sqrt(error / norm):10.2e} {math.sqrt(apart / norm):10.2e}")
        clips: dict[str, list[torch.Tensor]] = {}
        for name in ("cudnn", "flash4", EXACT, "ours", "ours+sum"):
            with Rounding(name):
                clips[name] = [
                    check.clip(pipe, prompt, seed, options.demo_steps) for seed in range(options.seeds)
                ]
    reference = clips.pop("cudnn")
    found = {
        name: [check.psnr(ours, theirs, 1.0) for ours, theirs in zip(made, reference, strict=True)]
        for name, made in clips.items()
    }
    check.print_rows("clips of the demo model, against cudnn's", found, "flash4", "ours")
    return 0


if __name__ == "__main__":
    sys.exit(main())
