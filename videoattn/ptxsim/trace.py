"""A launch as a list of events: who did what, in simulated order; as text and as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_AGENTS = {"tma": "copy engine", "mma": "MMA pipe", "ld": "tensor memory loads", "st": "tensor memory stores",
           "bulk": "bulk stores", "wgmma": "wgmma pipe"}  # fmt: skip


@dataclass
class Event:
    """`order` counts events; `until` is the order at which a wait or an asynchronous operation ended."""

    order: int
    cta: int
    track: str
    opcode: str
    line: int
    text: str = ""
    until: int | None = None


class Trace:
    """Collects the events of one launch."""

    def __init__(self, program):
        self.instrs = program.instrs
        self.events: list[Event] = []
        self.clock = 0

    def _add(self, cta: int, track: str, index: int, text: str = "") -> Event:
        self.clock += 1
        ins = self.instrs[index]
        event = Event(self.clock, cta, track, ins.opcode, ins.line, text)
        self.events.append(event)
        return event

    def note(self, ctx, index: int) -> None:
        """A warp executes an instruction with an effect."""
        track = f"warp {ctx.W.index}"
        last = ctx.last_event
        if last is not None and last.text.startswith("waits") and last.until is None:
            last.until = self.clock
            if last.line == self.instrs[index].line:
                return  # the same wait, now passing
        ctx.last_event = self._add(ctx.cta.index, track, index)

    def job(self, queue: object, ctx) -> Event | None:
        """An asynchronous operation is handed over."""
        if ctx is None or not isinstance(queue, tuple):
            return None
        return self._add(ctx.cta.index, _AGENTS.get(queue[0], str(queue[0])), ctx.at)

    def done(self, event: Event | None) -> None:
        """It has completed."""
        if event is not None:
            self.clock += 1
            event.until = self.clock

    def lines(self):
        """One line for each event: order, CTA, track, PTX line, opcode, what happened."""
        for e in self.events:
            span = f"..{e.until}" if e.until is not None else ""
            head = f"{f'{e.order}{span}':>13}  CTA {e.cta} {e.track:20} line {e.line:5}"
            yield f"{head}  {e.opcode}  {e.text}".rstrip()

    def chrome(self) -> dict:
        """The trace-event format that chrome://tracing and Perfetto read; microseconds count events."""
        out = []
        tracks: dict[tuple[int, str], int] = {}
        for e in self.events:
            tid = tracks.setdefault((e.cta, e.track), len(tracks) + 1)
            end = e.until if e.until is not None else e.order + 1
            out.append(
                {
                    "name": e.text or e.opcode,
                    "ph": "X",
                    "ts": e.order,
                    "dur": max(end - e.order, 1),
                    "pid": e.cta,
                    "tid": tid,
                    "args": {"opcode": e.opcode, "ptx line": e.line},
                }
            )
        for (cta, track), tid in tracks.items():
            out.append({"name": "thread_name", "ph": "M", "pid": cta, "tid": tid, "args": {"name": track}})
            out.append({"name": "process_name", "ph": "M", "pid": cta, "args": {"name": f"CTA {cta}"}})
        return {"traceEvents": out, "displayTimeUnit": "ns"}

    def write(self, path: Path) -> None:
        """Save chrome() as JSON."""
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(self.chrome()))
        beside.replace(path)
