"""The device and dtype of a render, and the kernels that can run there; needs torch alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from videoattn.dispatch import KINDS, AttentionCall, KernelUnavailable, choose, device_capability
from videoattn.render.checks import Prepared, check_device
from videoattn.render.errors import RenderError, UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}
LTX_KINDS = ("video_self", "video_text")
VIDEO_KINDS = (*LTX_KINDS, "video_connector")


def pick_device(name: str | None = None) -> torch.device:
    """The device asked for, or the first CUDA device, or the CPU; UsageError if it does not exist."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # torch knows devices that nothing here can render on, such as mps, and wraps indices beyond 127.
    check_device(name)
    index = int(name.partition(":")[2] or 0)
    if name != "cpu" and index >= torch.cuda.device_count():
        raise UsageError(f"no device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current one inside the block: streams and events are made on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pick_dtype(name: str, device: torch.device) -> str:
    """`auto` made explicit: bf16 where the GPU has it, fp16 on older GPUs, fp32 on a CPU."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "fp32"
    return "bf16" if device.type != "cuda" or torch.cuda.is_bf16_supported(False) else "fp16"


def device_name(device: torch.device) -> str:
    """The name of the device as its maker gives it, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def require_kernels(prepared: Prepared, device: torch.device, compare: tuple[str, ...]) -> None:
    """Raise RenderError before anything is loaded if a kernel asked for by name cannot run here at all."""
    info, asked = prepared.info, prepared.job.kernels
    kinds = LTX_KINDS if info.family == "ltx" else KINDS
    dtype, capability = DTYPES[pick_dtype(prepared.job.dtype, device)], device_capability(device)

    def refusal(kind: str, name: str) -> str | None:
        heads, head_dim = info.video_heads if kind in VIDEO_KINDS else info.audio_heads
        call = AttentionCall(1, heads, 1024, 1024, head_dim, dtype, device.type, capability, kind=kind)
        try:
            choose(call, name)
        except KernelUnavailable as error:
            return str(error)
        return None

    wanted = dict.fromkeys(kinds, asked) if isinstance(asked, str) else asked
    for kind, name in wanted.items():
        if kind not in kinds:
            raise UsageError(f"--attention: {info.name} has no {kind} calls, only {', '.join(kinds)}")
        reason = refusal(kind, name)
        if reason is not None:
            raise RenderError(reason)
    for arm in compare:
        reasons = [refusal(kind, arm) for kind in kinds]
        if reasons[0] is not None and None not in reasons:
            raise RenderError(f"--compare: {reasons[0]}")
