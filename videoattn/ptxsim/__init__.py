"""ptxsim: executes PTX for sm_90a, sm_100a and sm_103a on any CPU and explains what is wrong with it."""

from .errors import ExecutionError, LaunchError, PtxSimError, PtxSyntaxError, UnsupportedInstruction
from .findings import Finding
from .launch import Device, Kernel, Module, Report
from .memory import Buffer
from .schedule import Schedule
from .tensormap import TensorMap

__all__ = [
    "Buffer",
    "Device",
    "ExecutionError",
    "Finding",
    "Kernel",
    "LaunchError",
    "Module",
    "PtxSimError",
    "PtxSyntaxError",
    "Report",
    "Schedule",
    "TensorMap",
    "UnsupportedInstruction",
]
