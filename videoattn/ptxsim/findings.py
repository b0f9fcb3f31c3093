"""What the simulator reports about a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

ERROR = "error"
STRICT = "strict"


@dataclass(frozen=True)
class Where:
    """Place of a finding: PTX line, source position when `.loc` gave one, CTA and warp."""

    line: int = 0
    opcode: str = ""
    source: str = ""
    cta: int = -1
    warp: int = -1

    def __str__(self) -> str:
        parts = []
        if self.cta >= 0:
            parts.append(f"CTA {self.cta}" + (f" warp {self.warp}" if self.warp >= 0 else ""))
        if self.line:
            parts.append(f"PTX line {self.line}" + (f" ({self.opcode})" if self.opcode else ""))
        if self.source:
            parts.append(self.source)
        return ", ".join(parts)


@dataclass(frozen=True)
class Finding:
    """One defect.

    `severity` is "error" when the kernel is wrong under any reading, "strict" when the ISA demands something
    that shipping kernels leave out. `count` is how often it occurred.
    """

    kind: str
    severity: str
    message: str
    where: Where
    count: int = 1

    def __str__(self) -> str:
        times = f" [{self.count} times]" if self.count > 1 else ""
        return f"{self.severity}: {self.kind}: {self.message} ({self.where}){times}"


class FirstFinding(Exception):
    """Ends a launch that stops at its first finding."""


@dataclass
class FindingLog:
    """Collects findings, one entry for each kind, place and key; with `stop`, raises FirstFinding after the
    first.
    """

    entries: dict[tuple, Finding] = field(default_factory=dict)
    counts: dict[tuple, int] = field(default_factory=dict)
    stop: bool = False

    def add(self, kind: str, severity: str, message: str, where: Where, key: object = None) -> None:
        k = (kind, severity, where.line, key)
        if k not in self.entries:
            self.entries[k] = Finding(kind, severity, message, where)
        self.counts[k] = self.counts.get(k, 0) + 1
        if self.stop:
            raise FirstFinding

    def list(self) -> list[Finding]:
        """All findings, errors first."""
        out = [
            Finding(f.kind, f.severity, f.message, f.where, self.counts[k]) for k, f in self.entries.items()
        ]
        return sorted(out, key=lambda f: f.severity != ERROR)
