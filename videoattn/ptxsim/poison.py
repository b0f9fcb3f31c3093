"""Placeholders for registers that hold no value yet: never written, or a load still in flight."""

from __future__ import annotations

import numpy as np

from .findings import STRICT
from .hb import ORDER

_GARBAGE = 0x7FBADBAD


def _garbage(dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_:
        return np.zeros(32, np.bool_)
    size = np.dtype(dtype).itemsize
    bits = _GARBAGE if size <= 4 else _GARBAGE << 32 | _GARBAGE
    return np.full(32, bits & ((1 << 8 * size) - 1), f"u{size}").view(dtype)


_SIZES = {"pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.uint8}


class PoisonRegister:
    """A register that has not been written by all lanes; reading it is reported."""

    __slots__ = ("init", "reg", "value", "warp")

    def __init__(self, warp, reg, value: np.ndarray | None = None, init: np.ndarray | None = None):
        self.warp, self.reg, self.value, self.init = warp, reg, value, init

    def _whole(self) -> np.ndarray:
        if self.value is None:
            from .ptx import TYPE_BYTES

            size = TYPE_BYTES[self.reg.type]
            return _garbage(np.dtype(np.bool_ if not size else f"u{size}"))
        return self.value

    def _report(self) -> None:
        ctx = self.warp.machine.current(self.warp)
        if ctx is not None:
            ctx.report(
                "uninitialised register", f"{self.reg.name} is read before it is written", key=self.reg.index
            )

    def view(self, dtype) -> np.ndarray:
        """The value as a full warp sees it."""
        if self.init is None or not self.init[self.warp.live].all():
            self._report()
        return self._whole().view(dtype)

    def under(self, mask: np.ndarray) -> np.ndarray:
        """The value as the lanes of `mask` see it."""
        if self.init is None or not self.init[mask].all():
            self._report()
        return self._whole()

    def merged(self, mask: np.ndarray, new: np.ndarray):
        """This register after a write by the lanes of `mask`."""
        old = self._whole().view(new.dtype)
        init = mask.copy() if self.init is None else self.init | mask
        value = np.where(mask, new, old)
        return value if init.all() else PoisonRegister(self.warp, self.reg, value, init)


class PendingLoad:
    """A tcgen05.ld in flight; its registers are PendingRegister until it completes."""

    __slots__ = ("at", "ctx", "epoch", "sample", "values", "waited")

    def __init__(self, ctx, sample, epoch: int):
        self.ctx, self.at, self.sample, self.epoch = ctx, ctx.at, sample, epoch
        self.waited = False
        self.values: list[np.ndarray] | None = None

    def complete(self) -> list[np.ndarray]:
        values = self.values
        if values is None:
            values = self.values = self.sample()
        return values


class PendingRegister:
    """One destination of a tcgen05.ld that has not been waited for."""

    __slots__ = ("index", "load")

    def __init__(self, load: PendingLoad, index: int):
        self.load, self.index = load, index

    def _use(self) -> np.ndarray:
        if self.load.waited:  # a copy made by mov
            return self.load.complete()[self.index]
        ctx = self.load.ctx
        current = ctx.machine.current(ctx.W) or ctx
        line = ctx.machine.program.instrs[self.load.at].line
        column = ctx.W.ld_column  # the register dependence completes the load
        current.clock[ORDER, column] = max(current.clock[ORDER, column], self.load.epoch)
        current.report(
            "use before wait",
            f"a result of the tcgen05.ld at PTX line {line} is used before tcgen05.wait::ld",
            STRICT,
            key=self.load.at,
        )
        return self.load.complete()[self.index]

    def view(self, dtype) -> np.ndarray:
        return self._use().view(dtype)

    def under(self, mask: np.ndarray) -> np.ndarray:
        return self._use()

    def merged(self, mask: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.where(mask, new, self._use().view(new.dtype))
