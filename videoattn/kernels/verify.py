"""The self-check: a kernel runs small problems against fp32 in a child process before `auto` trusts it.

A hang or an illegal access costs the child, not the caller's process. A verdict belongs to one GPU model,
driver and build, is kept in the cache, and is only read, never made, inside an attention call.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from videoattn.kernels import library

TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Subject:
    """What a verdict is about: a kernel's build on a GPU model under a driver."""

    kernel: str
    gpu: str
    driver: str
    build: str

    @classmethod
    def here(cls, kernel: str, device: int) -> Subject:
        """The loaded library's kernel on CUDA device `device`.  Raises BuildError."""
        return cls(kernel, torch.cuda.get_device_name(device), driver_version(), library.build_id())

    @property
    def path(self) -> Path:
        """Where its verdict is kept."""
        gpu = re.sub(r"\W+", "-", self.gpu)
        return library.cache_root() / "verdicts" / f"{self.kernel}.{gpu}.{self.driver}.{self.build}.json"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one self-check; `detail` is one line for people."""

    passed: bool
    detail: str


@lru_cache(maxsize=1)
def driver_version() -> str:
    """The NVIDIA kernel driver's version, `unknown` where the kernel does not tell."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else "unknown"


def recall(subject: Subject) -> Verdict | None:
    """The remembered verdict, None if there is none that can be read."""
    try:
        return Verdict(**json.loads(subject.path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remember(subject: Subject, verdict: Verdict) -> None:
    """Keep the verdict for later processes."""
    subject.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=subject.path.parent, delete=False) as handle:
        json.dump(asdict(verdict), handle)
    os.replace(handle.name, subject.path)


def untrusted(kernel: str) -> str | None:
    """None if the kernel passed its self-check on the current device, else why it isn't trusted."""
    try:
        verdict = recall(Subject.here(kernel, torch.cuda.current_device()))
    except library.BuildError as error:
        return str(error)
    if verdict is None:
        return "it has not passed its self-check here yet; `videoattn doctor --verify` runs it"
    return None if verdict.passed else f"it failed its self-check: {verdict.detail}"


def verify(kernel: str, device: int = 0, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Run the kernel's self-check on CUDA device `device` in a child process and remember its verdict.

    A crash or a time-out is a failed check. Raises BuildError if the library can't be built or loaded.
    """
    subject = Subject.here(kernel, device)
    verdict = run_child(f"videoattn.kernels.{kernel}", f"cuda:{device}", timeout_s)
    remember(subject, verdict)
    return verdict


def ensure(kernel: str, device: int = 0) -> Verdict:
    """The remembered verdict, or a fresh one.  Raises BuildError."""
    return recall(Subject.here(kernel, device)) or verify(kernel, device)


def run_child(module: str, device: str, timeout_s: float) -> Verdict:
    """Check the kernel module in a child process that may hang or die."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "videoattn.kernels.verify", module, device],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return Verdict(False, f"no answer within {timeout_s:g} s")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return Verdict(bool(answer["passed"]) and done.returncode == 0, str(answer["detail"]))
    except (IndexError, ValueError, KeyError, TypeError):
        words = done.stderr.strip().splitlines()
        return Verdict(
            False, f"the check ended with status {done.returncode}" + (f": {words[-1]}" if words else "")
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One small attention; `lengths` are key lengths, past which the keys and values are NaN."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    lengths: tuple[int, ...] | None = None
    fused: bool = False  # q, k and v are views of one (batch, seq, 3, heads, head_dim) tensor
    outliers: bool = False

    def inputs(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q, k, v and the key lengths, from a fixed seed."""
        generator = torch.Generator().manual_seed(self.q_len * 7919 + self.kv_len)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype).to(device)

        if self.fused:
            packed = normal(self.batch, max(self.q_len, self.kv_len), 3, self.heads, self.head_dim)
            q, k, v = packed[:, : self.q_len, 0], packed[:, : self.kv_len, 1], packed[:, : self.kv_len, 2]
        else:
            q = normal(self.batch, self.q_len, self.heads, self.head_dim)
            k, v = (normal(self.batch, self.kv_len, self.heads, self.head_dim) for _ in range(2))
        if self.outliers:
            q[:, ::3] *= 8
        if self.lengths is None:
            return q, k, v, None
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        past = torch.arange(self.kv_len, device=device) >= lengths[:, None]
        k.masked_fill_(past[:, :, None, None], torch.nan)
        v.masked_fill_(past[:, :, None, None], torch.nan)
        return q, k, v, lengths


def problems() -> Iterator[Problem]:
    """Every code path once: head dims, dtypes, tails, short and long, lengths, views, outliers."""
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (128, 64):
            yield Problem(1, 2, 300, 517, head_dim, dtype)
            yield Problem(1, 1, 1, 1, head_dim, dtype)
            yield Problem(2, 3, 130, 700, head_dim, dtype, lengths=(0, 333))
            yield Problem(3, 2, 64, 256, head_dim, dtype, lengths=(256, 1, 128))
            yield Problem(1, 2, 777, 640, head_dim, dtype, fused=True)
            yield Problem(1, 40, 1500, 300, head_dim, dtype, outliers=True)


def check(module: str, device: str) -> str | None:
    """None if every problem keeps the accuracy rule and repeats bitwise, else the first failure."""
    from videoattn.kernels.accuracy import compare

    kernel = importlib.import_module(module)
    for problem in problems():
        q, k, v, lengths = problem.inputs(device)
        scale = problem.head_dim**-0.5
        (out, lse), (out_again, lse_again) = (
            kernel.run(q, k, v, scale=scale, kv_lengths=lengths, mask=None, return_lse=True) for _ in range(2)
        )
        errors = compare(out, lse, q, k, v, scale=scale, kv_lengths=lengths)
        if not errors.passed:
            return f"{problem}: {errors}"
        if not (torch.equal(out, out_again) and torch.equal(lse, lse_again)):
            return f"{problem}: two runs differ"
    return None


def main(arguments: list[str]) -> int:
    """The child's side: check a kernel module on a device and print one line of JSON."""
    module, device = arguments
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    failure = check(module, device)
    count = sum(1 for _ in problems())
    print(json.dumps({"passed": failure is None, "detail": failure or f"{count} problems agree with fp32"}))
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
