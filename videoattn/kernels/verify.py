"""The self-check: a kernel runs small problems against fp32 in a child process before `auto` trusts it.

A hang or an illegal access costs the child, not the caller's process. A verdict belongs to one GPU model,
driver and build, is kept in the cache, and is only read, never made, inside an attention call: `install()`
and `videoattn doctor --verify` make it.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from videoattn import kernels
from videoattn.kernels import library
from videoattn.typed_json import EXACT, fit, parse

if TYPE_CHECKING:
    from videoattn.dispatch import AttentionCall

# The kernels that `auto` must not bind without a verdict.
CHECKED = ("hopper", "blackwell")
TIMEOUT_S = 120.0
KILL_S = 10.0  # what a killed child has to go; one that waits for a hung GPU may never
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Subject:
    """What a verdict is about: a kernel's build on a GPU model under a driver."""

    kernel: str
    gpu: str
    driver: str
    build: str

    @classmethod
    def here(cls, kernel: str, device: torch.device) -> Subject:
        """The loaded library's kernel on a device.  Raises BuildError."""
        gpu = torch.cuda.get_device_name(indexed(device)) if device.type == "cuda" else device.type
        return cls(kernel, gpu, driver_version(), library.build_id())

    @property
    def path(self) -> Path:
        """Where its verdict is kept."""
        gpu = re.sub(r"\W+", "-", self.gpu)
        return library.cache_root() / "verdicts" / f"{self.kernel}.{gpu}.{self.driver}.{self.build}.json"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one self-check; `detail` is one line for people.

    Not `final`: the check could not run, which says nothing about the kernel and is not kept.
    """

    __pydantic_config__ = EXACT

    passed: bool
    detail: str
    final: bool = True


@lru_cache(maxsize=1)
def driver_version() -> str:
    """The NVIDIA kernel driver's version, `unknown` where the kernel does not tell."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else "unknown"


def indexed(device: torch.device) -> torch.device:
    """The device, `cuda` as the current CUDA device."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


# This process's verdicts, which count even where the cache can't be written.
_known: dict[Subject, Verdict] = {}


def recall(subject: Subject) -> Verdict | None:
    """The remembered verdict, None if there is none that can be read."""
    try:
        return fit(Verdict, parse(subject.path.read_bytes()))
    except (OSError, ValueError):
        return _known.get(subject)


def remember(subject: Subject, verdict: Verdict) -> None:
    """Keep the verdict for this process, and for later ones if it is final."""
    _known[subject] = verdict
    if not verdict.final:
        return
    try:
        subject.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=subject.path.parent, delete=False) as handle:
            json.dump(asdict(verdict), handle)
        os.replace(handle.name, subject.path)
    except OSError as error:
        warnings.warn(
            f"the self-check's verdict can't be kept in {subject.path.parent} ({error.strerror}): "
            "later processes run it again",
            RuntimeWarning,
            stacklevel=2,
        )


def untrusted(kernel: str, device_type: str) -> str | None:
    """None if the kernel passed its self-check on the current device of that type, else the reason."""
    try:
        verdict = recall(Subject.here(kernel, torch.device(device_type)))
    except library.BuildError as error:
        return str(error)
    if verdict is None:
        return "it has not passed its self-check here yet; `videoattn doctor --verify` runs it"
    if verdict.passed:
        return None
    if not verdict.final:
        return f"its self-check could not run here: {verdict.detail}"
    return f"it failed its self-check: {verdict.detail}; `videoattn doctor --verify` runs it again"


def verify(kernel: str, device: torch.device, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Run the kernel's self-check on a device in a child process and remember its verdict.

    A crash or a time-out is a failed check. Raises BuildError if the library can't be built or loaded.
    """
    subject = Subject.here(kernel, device)
    verdict = run_child(f"videoattn.kernels.{kernel}", str(indexed(device)), timeout_s)
    remember(subject, verdict)
    return verdict


def ensure(kernel: str, device: torch.device, timeout_s: float = TIMEOUT_S) -> Verdict:
    """The remembered verdict, or a fresh one; processes that need the same one wait for the first.

    Raises BuildError.
    """
    subject = Subject.here(kernel, device)
    if (verdict := recall(subject)) is not None and verdict.final:
        return verdict
    with _alone(subject.path.with_suffix(".lock")):
        if (verdict := recall(subject)) is not None and verdict.final:
            return verdict
        logging.getLogger(__name__).warning(
            "attention kernel '%s' runs its self-check on %s, once for this driver and build; at most %g s",
            kernel,
            subject.gpu,
            timeout_s,
        )
        return verify(kernel, device, timeout_s)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock file; where none can be made, checks may run side by side."""
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path, "w")), fcntl.LOCK_EX)
        yield


def settle(requests: Iterable[tuple[str, AttentionCall]], device: torch.device) -> bool:
    """Run the self-checks that are due before `auto` may bind a kernel to one of the calls.

    `requests` are kernel names or `auto`, each with a call on `device`. Only `auto` waits. A kernel that did
    not pass is named in a warning; `auto` does without it. Returns whether there is a new verdict.
    """
    ran = False
    waiting = [call for requested, call in requests if requested == "auto"]
    for name in CHECKED:
        kernel = kernels.get(name)
        if not any(kernel.supports(call) is None for call in waiting):
            continue
        known = recall(Subject.here(name, device))
        verdict = ensure(name, device)
        ran |= verdict != known
        if not verdict.passed:
            what = "failed its self-check" if verdict.final else "could not run its self-check"
            warnings.warn(
                f"attention kernel '{name}' {what} on {device} and is not used: {verdict.detail}",
                RuntimeWarning,
                stacklevel=4,
            )
    return ran


def run_child(module: str, device: str, timeout_s: float) -> Verdict:
    """Check the kernel module in a child process that may hang or die."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Files, not pipes: a child that can't be killed must not keep its reader.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "videoattn.kernels.verify", module, device],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # The reference is fp32, whatever the caller lets its own matrix products be.
                env={**os.environ, "PYTHONPATH": path, "NVIDIA_TF32_OVERRIDE": "0"},
                start_new_session=True,
            )
        except OSError as error:
            return Verdict(False, f"no process could be started: {error}", final=False)
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"no answer within {timeout_s:g} s")
        finally:
            _end(child)
        out.seek(0)
        err.seek(0)
        return _read_answer(status, out.read(), err.read())


def _end(child: subprocess.Popen) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(KILL_S)


def _read_answer(status: int, out: str, err: str) -> Verdict:
    try:
        answer = json.loads(out.splitlines()[-1])
        passed, detail = answer["passed"], str(answer["detail"])
    except (IndexError, ValueError, KeyError, TypeError):
        words = err.strip().splitlines()
        return Verdict(False, f"the check ended with status {status}" + (f": {words[-1]}" if words else ""))
    if passed is None:
        return Verdict(False, detail, final=False)
    if passed and status != 0:
        return Verdict(False, f"all results were right, but the process ended with status {status}")
    return Verdict(bool(passed), detail)


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
    """Every code path once: head dims, dtypes, tails, short and long, split keys, views, outliers."""
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (128, 64):
            yield Problem(1, 2, 300, 517, head_dim, dtype)
            yield Problem(1, 1, 1, 1, head_dim, dtype)
            yield Problem(2, 3, 130, 700, head_dim, dtype, lengths=(0, 333))
            yield Problem(3, 2, 64, 256, head_dim, dtype, lengths=(256, 1, 128))
            yield Problem(1, 2, 777, 640, head_dim, dtype, fused=True)
            yield Problem(1, 40, 1500, 300, head_dim, dtype, outliers=True)
            yield Problem(1, 2, 64, 4096, head_dim, dtype)


def check(module: str, device: str) -> str | None:
    """None if every problem keeps the accuracy rule, repeats bitwise and is gated right, else the failure."""
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
        if getattr(kernel, "GATES", False):
            logits = q[..., 0].contiguous()
            gated, _ = kernel.run(
                q, k, v, scale=scale, kv_lengths=lengths, mask=None, return_lse=False, gate=logits
            )
            expected = out * (2 * torch.sigmoid(logits))[..., None]
            # One other last bit of the sigmoid, and the product's rounding.
            numbers = torch.finfo(q.dtype)
            if not torch.allclose(gated, expected, rtol=2 * numbers.eps, atol=numbers.tiny):
                return f"{problem}: the gates are wrong"
    return None


def main(arguments: list[str]) -> int:
    """The child's side: check a kernel module on a device and print one line of JSON."""
    module, device = arguments
    try:
        # Fails without the kernel's doing where another process holds the GPU or all of its memory.
        torch.empty(1 << 20, device=device)
    except (RuntimeError, AssertionError) as error:
        return _answer(None, str(error).splitlines()[0])
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        failure = check(module, device)
    except torch.OutOfMemoryError:
        return _answer(None, f"no memory is left on {device}")
    count = sum(1 for _ in problems())
    return _answer(failure is None, failure or f"{count} problems agree with fp32")


def _answer(passed: bool | None, detail: str) -> int:
    print(json.dumps({"passed": passed, "detail": detail}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
