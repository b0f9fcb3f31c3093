"""Operations among the lanes of a warp: elect, vote, shuffle, reduce, bar.warp.sync."""

from __future__ import annotations

import numpy as np

from .core import Core, Wait, lane_list
from .errors import ExecutionError

_LANE = np.arange(32)


def _bits(mask: np.ndarray) -> int:
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


def _lanes(bits: int) -> np.ndarray:
    return np.unpackbits(np.array([bits & 0xFFFFFFFF], np.uint32).view(np.uint8), bitorder="little").view(
        np.bool_
    )


class WarpOps(Core):
    """Mixed into Context."""

    def _converged(self, mask: np.ndarray, what: str) -> bool:
        """Whether a whole warp executes an .aligned instruction; reports when only some of its lanes do.

        A guard that is false in every lane leaves an empty mask: nothing executes, nothing is wrong.
        """
        if self.full and mask.all():
            return True
        if not mask.any():
            return False
        missing = self.W.live & ~mask
        if missing.any() or not self.W.live.all():
            who = lane_list(missing if missing.any() else ~self.W.live)
            self.report(
                "divergent aligned instruction", f"{what} needs the whole warp; lanes {who} do not take part"
            )
            return False
        return True

    def _member(self, mask: np.ndarray, member: np.ndarray, index: int) -> np.ndarray | None:
        """Lanes that take part in a .sync operation, or None while some of them are still elsewhere."""
        lanes = _lanes(int(member[np.flatnonzero(mask)[0]])) if mask.any() else mask
        if not mask.any():
            return mask
        if (mask & ~lanes).any():
            self.report(
                "membermask", f"a lane executes {self.where().opcode} without being in its member mask"
            )
        want = lanes & self.W.live
        if not (want & ~mask).any():
            self.W.syncs.pop(index, None)
            return mask & lanes
        return self._gather(mask, want, index)

    def _gather(self, mask: np.ndarray, want: np.ndarray, index: int) -> np.ndarray | None:
        """Wait for other contexts of the warp at the same instruction, then continue as one."""
        group = self.W.syncs.setdefault(index, [])
        if self not in group:
            group.append(self)
        here = np.zeros(32, np.bool_)
        for c in group:
            here |= c.mask
        if (want & ~here).any():
            missing = want & ~here
            self.block(Wait(f"at {self.where().opcode} for lanes {lane_list(missing)}"))
            return None
        depth = min(len(c.joins) for c in group)
        common = 0
        while common < depth and all(c.joins[common] is self.joins[common] for c in group):
            common += 1
        for c in group:
            for join in c.joins[common:]:
                join.expected = join.expected & ~c.mask
                if join.waiting:
                    join.waiting[0].try_join(join)
            if c is not self:
                np.maximum(self.clock, c.clock, out=self.clock)
                c.state = "merged"
                c.W.contexts.remove(c)
        self.joins = self.joins[:common]
        self.set_mask(here)
        self.W.syncs.pop(index, None)
        self.machine.wake(self)  # run again, now with all lanes
        return None

    def warp_sync(self, mask, member, index: int):
        lanes = np.flatnonzero(mask)
        if not len(lanes):
            return True
        bits = int(member[lanes[0]])
        want = _lanes(bits) & self.W.live
        self.W.unsynced = self.W.unsynced & ~want
        if not (want & ~mask).any():
            return True
        key = ("warp", bits)
        group = self.W.syncs.setdefault(key, [])
        done = [g for g in group if g[0] is self and g[2]]
        if done:
            group.remove(done[0])
            return True
        group[:] = [g for g in group if g[0] is not self]
        group.append([self, mask.copy(), False])
        here = np.zeros(32, np.bool_)
        for _, m, released in group:
            if not released:
                here |= m
        if (want & ~here).any():
            missing = want & ~here
            self.block(Wait(lambda: f"at bar.warp.sync for lanes {lane_list(missing & self.W.live)}"))
            return None
        clock = self.clock.copy()
        for c, _, _ in group:
            np.maximum(clock, c.clock, out=clock)
        for g in group:
            g[0].clock[:] = clock
            g[2] = True
            if g[0] is not self:
                self.machine.wake(g[0])
        group[:] = [g for g in group if g[0] is not self]
        return True

    def elect(self, mask, member, index: int):
        lanes = self._member(mask, member, index)
        if lanes is None:
            return None
        leader = int(np.flatnonzero(lanes)[0]) if lanes.any() else 0
        return np.full(32, leader, np.uint32), leader == _LANE

    def vote(self, kind: str, mask, p, member, index: int):
        lanes = self._member(mask, member, index)
        if lanes is None:
            return None
        p = p & lanes
        if kind == "ballot":
            return np.full(32, _bits(p), np.uint32)
        if kind == "any":
            value = p.any()
        elif kind == "all":
            value = (p == lanes).all()
        else:
            value = (p == lanes).all() or not p.any()
        return np.full(32, bool(value), np.bool_)

    def shfl(self, mode: str, mask, a, b, c, member, index: int):
        lanes = self._member(mask, member, index)
        if lanes is None:
            return None
        lane = _LANE.astype(np.int64)
        bval, cval = b.astype(np.int64) & 31, c.astype(np.int64)
        segmask, clamp = (cval >> 8) & 31, cval & 31
        high = (lane & segmask) | (clamp & ~segmask)
        low = lane & segmask
        if mode == "up":
            src = lane - bval
            ok = src >= high
        elif mode == "down":
            src = lane + bval
            ok = src <= high
        elif mode == "bfly":
            src = lane ^ bval
            ok = src <= high
        else:
            src = low | (bval & ~segmask)
            ok = src <= high
        src = np.where(ok, src, lane)
        outside = lanes & ~lanes[src]
        if outside.any():
            self.report("shuffle source", "shfl reads a lane that does not take part", key=mode)
        return a[src], ok

    def redux(self, kind: str, mask, a, member, index: int):
        lanes = self._member(mask, member, index)
        if lanes is None:
            return None
        values = a[lanes]
        fn = {
            "add": np.add,
            "min": np.fmin if a.dtype.kind == "f" else np.minimum,
            "max": np.fmax if a.dtype.kind == "f" else np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[kind]
        return np.full(32, fn.reduce(values) if len(values) else 0, a.dtype)

    def match_any(self, mask, a, member, index: int):
        lanes = self._member(mask, member, index)
        if lanes is None:
            return None
        out = np.zeros(32, np.uint32)
        for lane in np.flatnonzero(lanes):
            out[lane] = _bits((a == a[lane]) & lanes)
        return out

    def activemask(self, mask) -> np.ndarray:
        return np.full(32, _bits(mask), np.uint32)

    def trap(self, mask) -> None:
        if mask.any():
            self.report("trap", "the kernel executed trap")
            raise ExecutionError(f"trap at {self.where()}")
