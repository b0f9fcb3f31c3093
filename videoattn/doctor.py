"""What this machine can do: device, versions, kernels and why not, codecs, disk."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "av", "imageio", "gradio", "peft", "ray")
REQUIRED = {"torch", "diffusers", "transformers", "accelerate", "av", "imageio", "gradio"}
CODECS = {"libx264": "h264 video", "aac": "sound"}
# The two kinds of call that make up an LTX-2.x clip: 1536x1024, 249 frames, second stage.
CALLS = {"head dim 128 (video)": (49152, 128), "head dim 64 (sound)": (259, 64)}


def examine(console: Console) -> int:
    """Print what was found; returns 1 if something that a render needs is missing, else 0."""
    problems: list[str] = []
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in [
        *_machine(problems),
        *_packages(problems),
        *_kernels(),
        *_codecs(problems),
        *_disk(),
    ]:
        table.add_row(name, Text(value))
    console.print(table)
    for problem in problems:
        console.print(Text(f"missing: {problem}", style="red"))
    return 1 if problems else 0


def verify_kernels(console: Console) -> int:
    """Run the self-check of our kernels on each GPU they are built for; returns 1 if one fails, else 0."""
    import torch

    from videoattn.kernels import blackwell, hopper, library, verify

    if not torch.cuda.is_available():
        console.print(Text("self-check: there is no GPU to check a kernel on", style="red"))
        return 1
    failed = False
    for index in range(torch.cuda.device_count()):
        for name, kernel in (("hopper", hopper), ("blackwell", blackwell)):
            if torch.cuda.get_device_capability(index) not in kernel.CAPABILITIES:
                continue
            try:
                verdict = verify.verify(name, torch.device("cuda", index))
            except library.BuildError as error:
                console.print(Text(f"self-check of {name} on cuda:{index}: {error}", style="red"))
                failed = True
                continue
            outcome = "passed" if verdict.passed else "FAILED" if verdict.final else "could not run"
            style = "" if verdict.passed else "red"
            console.print(
                Text(f"self-check of {name} on cuda:{index}: {outcome}, {verdict.detail}", style=style)
            )
            failed |= not verdict.passed
    return int(failed)


def _machine(problems: list[str]) -> list[tuple[str, str]]:
    rows = [("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")]
    try:
        import torch
    except ImportError:
        problems.append("torch cannot be imported")
        return rows
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else "no NVIDIA driver or device was found"
        return [*rows, ("device", f"cpu, {torch.get_num_threads()} threads ({why})")]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows.append(
            (
                f"cuda:{index}",
                f"{found.name}, compute capability {found.major}.{found.minor}, "
                f"{found.multi_processor_count} SMs, "
                f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
            )
        )
    return [*rows, ("CUDA", f"{torch.version.cuda} in torch, driver {_driver()}")]


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return "unknown"
    words = path.read_text().split("\n", 1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _packages(problems: list[str]) -> list[tuple[str, str]]:
    rows = []
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            if package in REQUIRED:
                problems.append(f"the package {package}")
            rows.append((package, "not installed"))
    return rows


def _kernels() -> list[tuple[str, str]]:
    import torch

    from videoattn import kernels
    from videoattn.dispatch import AUTO_ORDER, AttentionCall, device_capability
    from videoattn.kernels import library

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows = [("kernels", library.describe())]
    for name in kernels.NAMES:
        verdicts = {}
        for label, (length, head_dim) in CALLS.items():
            call = AttentionCall(
                1, 32, length, length, head_dim, dtype, device.type, device_capability(device)
            )
            kernel = kernels.get(name)
            reason = kernel.supports(call)
            if reason is None:
                untrusted = kernel.untrusted(call)
                if name not in AUTO_ORDER:
                    verdicts[label] = "ready, when asked for by name"
                else:
                    verdicts[label] = f"by name only: {untrusted}" if untrusted else "ready"
            else:
                verdicts[label] = f"no: {reason}"
        if len(set(verdicts.values())) == 1:
            rows.append((f"kernel {name}", next(iter(verdicts.values()))))
        else:
            rows.append(
                (f"kernel {name}", "; ".join(f"{label}: {verdict}" for label, verdict in verdicts.items()))
            )
    return rows


def _codecs(problems: list[str]) -> list[tuple[str, str]]:
    import av
    import av.error

    rows = []
    for codec, purpose in CODECS.items():
        try:
            found = av.Codec(codec, "w").long_name
        except (av.error.FFmpegError, ValueError):
            found = "missing"
            problems.append(f"the ffmpeg encoder {codec} ({purpose}) in PyAV")
        rows.append((f"codec {codec}", f"{purpose}: {found}"))
    return rows


def _disk() -> list[tuple[str, str]]:
    from huggingface_hub import constants

    rows = []
    for label, place in (("here", Path.cwd()), ("hub cache", Path(constants.HF_HUB_CACHE))):
        existing = place
        while not existing.exists():
            existing = existing.parent
        usage = shutil.disk_usage(existing)
        rows.append(
            (f"disk, {label}", f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} at {place}")
        )
    return rows
