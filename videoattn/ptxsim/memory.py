"""Global buffers with guard gaps, shared memory, and the names of things in it."""

from __future__ import annotations

import bisect
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ExecutionError, LaunchError
from .hb import Shadow
from .mbarrier import Mbarrier

if TYPE_CHECKING:
    from .inflight import SharedLoad

SHARED_WINDOW = 0x7A00_0000_0000  # where generic addresses of shared and local memory start
LOCAL_WINDOW = 0x7C00_0000_0000
SHARED_BASE = 1024  # the driver keeps the first KiB of each CTA's window
_GUARD = 1 << 16
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def readable(symbol: str) -> str:
    """A mangled name's last part: _ZZ3fooE3bar is bar."""
    parts, i = [], 0
    while symbol.startswith("_Z") and i < len(symbol):
        m = re.match(r"\d+", symbol[i:])
        if not m:
            i += 1
            continue
        i += m.end()
        parts.append(symbol[i : i + int(m.group())])
        i += int(m.group())
    return parts[-1] if parts else symbol


class Buffer:
    """Global memory of a simulated device; `address` is 256-byte aligned, `download()` copies it back."""

    def __init__(self, address: int, data: np.ndarray, like, name: str):
        self.address, self.data, self.name = address, data, name
        self._like = like
        self.nbytes = data.nbytes
        self.views = {size: data[: data.nbytes // size * size].view(t) for size, t in _WORDS.items()}

    def download(self) -> Any:
        """A copy of the contents, in the type and shape that was uploaded."""
        dtype, shape, kind = self._like
        raw = self.data[: self.nbytes].copy()
        if kind == "torch":
            import torch

            return torch.from_numpy(raw).view(dtype).reshape(shape)
        return raw.view(dtype).reshape(shape)

    def __repr__(self) -> str:
        return f"Buffer({self.name}, {self.nbytes} bytes at {self.address:#x})"


class GlobalMemory:
    """Address space of the device."""

    def __init__(self) -> None:
        self.next = 0x10_0000_0000
        self.buffers: list[Buffer] = []
        self.starts: list[int] = []

    def add(self, raw: np.ndarray, like, name: str, align: int = 256) -> Buffer:
        pad = -(-max(raw.nbytes, 8) // 8) * 8
        data = np.zeros(pad, np.uint8)
        data[: raw.nbytes] = raw
        address = -(-self.next // align) * align
        buf = Buffer(address, data, like, name)
        buf.nbytes = raw.nbytes
        self.next = address + pad + _GUARD
        self.buffers.append(buf)
        self.starts.append(address)
        return buf

    def upload(self, array, name: str) -> Buffer:
        if type(array).__module__.split(".")[0] == "torch":
            import torch

            if not isinstance(array, torch.Tensor) or array.device.type != "cpu":
                raise LaunchError("upload takes numpy arrays and torch CPU tensors")
            tensor = array.detach().contiguous()
            raw = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
            return self.add(raw, (tensor.dtype, tuple(tensor.shape), "torch"), name)
        array = np.ascontiguousarray(array)
        return self.add(array.reshape(-1).view(np.uint8), (array.dtype, array.shape, "numpy"), name)

    def find(self, address: int) -> Buffer | None:
        """The buffer that contains `address`."""
        i = bisect.bisect_right(self.starts, address) - 1
        if i < 0:
            return None
        buf = self.buffers[i]
        return buf if address < buf.address + buf.nbytes else None

    def describe(self, address: int) -> str:
        i = bisect.bisect_right(self.starts, address) - 1
        if i < 0:
            return f"{address:#x}"
        buf = self.buffers[i]
        past = address - buf.address - buf.nbytes
        if past < 0:
            return f"{address:#x}, {-past} bytes before the end of {buf.name}"
        return f"{address:#x}, {past} bytes past the end of {buf.name}"

    def span(self, address: int, nbytes: int) -> tuple[Buffer, int]:
        """(buffer, offset) of a range that must lie inside one buffer."""
        buf = self.find(address)
        if buf is None or address + nbytes > buf.address + buf.nbytes:
            raise ExecutionError(
                f"global range of {nbytes} bytes at {self.describe(address)} is not allocated"
            )
        return buf, address - buf.address


class SharedMemory:
    """One CTA's shared memory; addresses carry the CTA's rank in the cluster in bits 24 and up."""

    def __init__(self, size: int, names: list[tuple[int, int, str]]):
        self.size = size
        padded = -(-size // 16) * 16 + 16
        self.data = np.full(padded, 0xCD, np.uint8)
        self.views = {n: self.data.view(t) for n, t in _WORDS.items()}
        self.names = sorted(names)
        self.shadow = Shadow(padded // 4)
        self.barriers: dict[int, Mbarrier] = {}
        self.unread: dict[tuple, SharedLoad] = {}  # loads that have not taken their values yet
        self.escaped: dict[tuple, SharedLoad] = {}  # loads in flight when their warp released

    def settle(self) -> None:
        """Loads in flight take their values before a generic write: that order every release keeps."""
        for load in list(self.unread.values()):
            load.read()

    def overrun(self, offset: int, nbytes: int) -> tuple[str, int] | None:
        """(variable, its size) when a range that starts in a variable of known size leaves it."""
        for start, size, symbol in self.names:
            if size and start <= offset < start + size < offset + nbytes:
                return readable(symbol), size
        return None

    def name(self, offset: int) -> str:
        """`symbol+offset` of an address within the CTA."""
        best = f"shared {offset:#x}"
        for start, size, symbol in self.names:
            if start <= offset and (not size or offset < start + size):
                delta = offset - start
                best = readable(symbol) if not delta else f"{readable(symbol)}+{delta:#x}"
        return best
