"""Per-call timing of attention, with shadow arms beside the kernel that serves."""

from videoattn.timing.log import TimingLog, load
from videoattn.timing.recorder import Recording, record_timing

__all__ = ["Recording", "TimingLog", "load", "record_timing"]
