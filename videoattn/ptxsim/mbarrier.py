"""The mbarrier object: phase, pending arrivals, transaction count (PTX ISA 9.7.13.15)."""

from __future__ import annotations

import numpy as np

MAX_COUNT = (1 << 20) - 1


class Mbarrier:
    """State of one barrier, and what a thread that observes a phase's completion learns."""

    def __init__(self, name: str, count: int, columns, column: int):
        self.name = name
        self.expected = self.pending = count
        self.tx = 0
        self.phase = 0
        self.column = column
        self.waiters: list = []
        self.gathering = columns.payload()
        self.done = columns.payload()
        self.expected_tx = 0  # bytes announced in this phase
        self.arrivals: list[str] = []  # who arrived in this phase, in words
        self.fenced = False  # the initialisation is visible to the engines
        self.init_column = self.init_epoch = 0
        self.observed = True  # some wait returned true for the last completed phase
        self.phase_base = 0  # phases of earlier barriers at this address

    def parity_passes(self, parity: int) -> bool:
        """Whether the phase of this parity has completed."""
        return parity != (self.phase & 1)

    def gather(self, payload: np.ndarray) -> None:
        """Take in what an arrival releases."""
        np.maximum(self.gathering, payload, out=self.gathering)

    def arrive(self, count: int) -> bool:
        """Count arrivals; false when they exceed what is pending."""
        if count > self.pending:
            return False
        self.pending -= count
        return True

    def complete(self) -> bool:
        """Flip the phase if nothing is outstanding."""
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.expected
        self.expected_tx = 0
        self.arrivals = []
        self.observed = False
        np.maximum(self.done, self.gathering, out=self.done)
        self.done[0, self.column] = self.phase_base + self.phase
        return True

    def epoch(self) -> int:
        """Clock value of this barrier's column once the open phase completes."""
        return self.phase_base + self.phase + 1

    def describe(self) -> str:
        """State in words, for a finding."""
        text = f"phase {self.phase} open, {self.pending} of {self.expected} arrivals missing"
        if self.tx > 0:
            text += f", {self.tx} of {self.expected_tx} expected bytes missing"
        elif self.tx < 0:
            text += f", {-self.tx} bytes arrived that nobody expected"
        return text
