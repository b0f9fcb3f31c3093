"""Where the roles of the Hopper kernel spend their time: a Perfetto trace, and a table of phases.

Builds the kernel with VIDEOATTN_PROFILE, in which the producer and every consumer write down when they
enter a phase (csrc/hopper/profile.cuh). Open the trace at ui.perfetto.dev. Recording costs a store a phase,
and the clock behind %globaltimer is coarse, so look at sums before single spans.

    python scripts/profile_hopper.py --shape 1,32,12288,12288,128 --ctas 4 --output trace.json
    python scripts/profile_hopper.py --simulate --shape 1,1,300,600,128   # no GPU: order without durations
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_attention as bench
import tune_hopper

from videoattn.kernels import abi, library, native, plan, ptxas, simulated
from videoattn.ptxsim import Device

EVENTS = 4096  # kProfileEvents of profile.cuh
PHASES = (
    "end",
    "wait for a key buffer",
    "wait for a value buffer",
    "wait for a query buffer",
    "load",
    "wait for keys",
    "wait for the turn",
    "issue",
    "wait for scores",
    "softmax",
    "wait for P V",
    "pack P",
    "epilogue",
)


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one role; nanoseconds of the GPU's clock, or the simulator's steps."""

    cta: int
    role: int  # 0 the producer, then the consumers
    phase: str
    start: int
    end: int


def decode(buffer: torch.Tensor, roles: int) -> list[Span]:
    """The spans in a buffer of (CTAs * roles * EVENTS) 64-bit words; a zero word was never written."""
    spans = []
    for number, words in enumerate(buffer.view(-1, EVENTS).tolist()):
        marks = [(word >> 56, word & (1 << 56) - 1) for word in words if word]
        for (code, start), (_, end) in pairwise(marks):
            if code == 1:
                break
            spans.append(Span(number // roles, number % roles, PHASES[code - 1], start, end))
    return spans


def role_name(role: int) -> str:
    return "producer" if role == 0 else f"consumer {role - 1}"


def chrome(spans: Sequence[Span], ctas: int, unit: float) -> dict:
    """The trace-event format that Perfetto reads, of the first CTAs; `unit`: microseconds of one tick."""
    shown = [span for span in spans if span.cta < ctas]
    origin = min((span.start for span in shown), default=0)
    events: list[dict] = []
    for cta in sorted({span.cta for span in shown}):
        events.append({"name": "process_name", "ph": "M", "pid": cta, "args": {"name": f"CTA {cta}"}})
        for role in sorted({span.role for span in shown if span.cta == cta}):
            name = {"name": role_name(role)}
            events.append({"name": "thread_name", "ph": "M", "pid": cta, "tid": role, "args": name})
    for span in shown:
        events.append(
            {
                "name": span.phase,
                "ph": "X",
                "ts": (span.start - origin) * unit,
                "dur": (span.end - span.start) * unit,
                "pid": span.cta,
                "tid": span.role,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def table(spans: Sequence[Span]) -> list[str]:
    """For each role the share of its time in every phase, and the mean ticks of one visit."""
    ticks: dict[tuple[int, str], int] = defaultdict(int)
    visits: dict[tuple[int, str], int] = defaultdict(int)
    for span in spans:
        ticks[span.role, span.phase] += span.end - span.start
        visits[span.role, span.phase] += 1
    lines = [f"{'role':<12} {'phase':<24} {'share':>6} {'visits':>8} {'mean':>9}"]
    for role in sorted({role for role, _ in ticks}):
        whole = sum(count for (r, _), count in ticks.items() if r == role) or 1
        for (r, phase), count in sorted(ticks.items(), key=lambda item: -item[1]):
            if r == role:
                n = visits[r, phase]
                lines.append(f"{role_name(r):<12} {phase:<24} {count / whole:6.1%} {n:8} {count / n:9.1f}")
    return lines


def profiled_call(q, k, v, out, buffer, **options) -> abi.Call:
    """A call whose workspace is the profile's buffer, as a build with VIDEOATTN_PROFILE takes it."""
    call = native.fill_call(q, k, v, out, scale=q.shape[-1] ** -0.5, arch=90, splits=1, **options)
    call.workspace = buffer
    return call


def simulate(q, k, v, grid: int) -> tuple[torch.Tensor, int]:
    """The recorded words and the roles of a CTA, by the simulator."""
    device = Device("sm_90a")
    memory = simulated.Memory(device)
    out = torch.full_like(q, torch.nan)
    options = {"grid": grid, "num_sms": device.sm_count}
    roles = plan.plan(profiled_call(q, k, v, out, 16, **options)).block[0] // 128
    words = torch.zeros(grid * roles * EVENTS, dtype=torch.int64)
    call = profiled_call(q, k, v, out, memory.address(words), **options)
    for tensor, field in ((q, call.q), (k, call.k), (v, call.v), (out, call.out)):
        field.data = memory.address(tensor)
    report = simulated.launch(device, plan.plan(call), "sm_90a", None)
    if report.findings:
        raise SystemExit(str(report))
    memory.download()
    return words, roles


def measure(q, k, v, sources: Path) -> tuple[torch.Tensor, int]:
    """The recorded words of one launch after two others, and the roles of a CTA, on this machine's GPU."""
    built = abi.declare(ctypes.CDLL(str(library.build(sources=sources))))
    out = torch.empty_like(q)
    sms = native.num_sms(q.device.index)
    made = abi.Plan()
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    options = {"num_sms": sms, "stream": torch.cuda.current_stream().cuda_stream}
    sketch = profiled_call(q, k, v, out, 16, **options)
    if built.videoattn_plan(ctypes.byref(sketch), ctypes.byref(made), text, abi.MESSAGE_BYTES) != abi.OK:
        raise SystemExit(text.value.decode())
    roles = made.block[0] // 128
    words = torch.zeros(made.grid[0] * roles * EVENTS, dtype=torch.int64, device=q.device)
    call = profiled_call(q, k, v, out, words.data_ptr(), **options)
    for _ in range(3):
        words.zero_()
        if built.videoattn_attention(ctypes.byref(call), text, abi.MESSAGE_BYTES) != abi.OK:
            raise SystemExit(text.value.decode())
    torch.cuda.synchronize()
    return words.cpu(), roles


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="1,32,12288,12288,128", metavar="B,H,Sq,Skv,D")
    parser.add_argument("--variant", default=None, choices=list(tune_hopper.VARIANTS))
    parser.add_argument("--simulate", action="store_true", help="in the simulator, on two CTAs")
    parser.add_argument("--ctas", type=int, default=4, help="CTAs in the trace; the table covers all")
    parser.add_argument("--output", type=Path, default=Path("hopper_profile.json"))
    options = parser.parse_args()
    if not options.simulate and not torch.cuda.is_available():
        print("profile_hopper needs an NVIDIA GPU; --simulate shows the order without one", file=sys.stderr)
        return 1
    shape = bench.parse_shape(options.shape)
    device = "cpu" if options.simulate else "cuda"
    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v = (
        torch.randn(shape.batch, length, shape.heads, shape.head_dim, generator=generator, device=device).to(
            torch.bfloat16
        )
        for length in (shape.q_len, shape.kv_len, shape.kv_len)
    )
    library.FLAGS = (*library.FLAGS, "-DVIDEOATTN_PROFILE")
    ptxas.FLAGS = (*ptxas.FLAGS, "-DVIDEOATTN_PROFILE")
    plan.FLAGS = (*plan.FLAGS, "-DVIDEOATTN_PROFILE")
    with tempfile.TemporaryDirectory() as folder:
        if options.variant is not None:
            library.SOURCES = tune_hopper.VARIANTS[options.variant].write(Path(folder))
        if options.simulate:
            planner = abi.declare(ctypes.CDLL(str(plan.build(library.SOURCES))))
            plan.load = lambda: planner
            words, roles = simulate(q, k, v, grid=2)
        else:
            words, roles = measure(q, k, v, library.SOURCES)
    spans = decode(words, roles)
    print("\n".join(table(spans)))
    # The simulator's steps are shown as microseconds.
    trace = chrome(spans, options.ctas, 1.0 if options.simulate else 1e-3)
    bench.write_json(options.output, trace, indent=None)
    print(f"trace: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
