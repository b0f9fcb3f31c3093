"""What a timing log says: tables per stage and kind, shadow arms, and Amdahl's ceiling on the clip."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from videoattn.dispatch import KINDS
from videoattn.timing.log import CallRow, ForwardTime, StageTime, TimingLog

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table


@dataclass(slots=True)
class ArmLine:
    """A shadow arm over the calls of one line.

    `calls` counts the calls where both times are free of marks, and `ratio` is the median over those of the
    arm's time over the kernel's: above 1 the render's kernel was faster. In the total it is the mean of the
    lines' ratios weighted by the kernel's time. `max_abs_diff` is the largest over all calls the arm served,
    None when one was not finite or none was served. `whole_clip` is the clip's time with the arm in place of
    the kernel over its time now, predicted from the ratio and the share; calls the arm can't serve stay as
    they are. `refused` counts calls by the reason the arm did not run.
    """

    calls: int
    ratio: float | None
    max_abs_diff: float | None
    not_finite: int
    whole_clip: float | None
    refused: dict[str, int]


@dataclass(slots=True)
class Line:
    """The calls of one kind in one stage, or of all (`kind` and `stage` None in the total).

    `total_ms` sums every timed call, marked ones included; `marked` counts those that were too short to
    time or captured. `tflops` is over the unmarked calls. `share` is `total_ms` over the render's time and
    `ceiling` the speed-up of the whole clip if these calls took no time, 1 / (1 − share) (Amdahl).
    """

    stage: str | None
    kind: str | None
    calls: int
    kernels: dict[str, int]
    total_ms: float
    marked: int
    tflops: float | None
    share: float | None
    ceiling: float | None
    arms: dict[str, ArmLine] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """The summary of a timing log; print it, or take `to_dict()`.

    `clip_seconds` and `stage_seconds` (wall seconds by name) are None when shadow arms ran, since these
    change the clock and the power the render runs at; `share_is_estimate` is then true: the shares are of
    the run's time less what the arms took.
    """

    device: str
    compare: tuple[str, ...]
    clips: int
    clip_seconds: dict[str, float] | None
    stage_seconds: dict[str, float] | None
    share_is_estimate: bool
    lines: list[Line]
    total: Line
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    def to_json(self) -> str:
        """`to_dict()` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        yield _calls_table(self)
        if self.compare:
            yield _arms_table(self)
        yield from map(Text, self.notes)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        out = StringIO()
        Console(file=out, width=110, highlight=False).print(self)
        return out.getvalue().rstrip()


def summarise(log: TimingLog, *, whole: TimingLog | None = None) -> Report:
    """Summarise a timing log.

    `whole` is the log of the same render without shadow arms: seconds, totals and shares then come from it,
    and only the comparison from `log`.

    Raises:
        ValueError: `whole` has shadow arms itself, or its calls are not those of `log`.
    """
    base = log if whole is None else whole
    if whole is not None:
        if whole.compare:
            raise ValueError(f"the whole-clip log has shadow arms itself ({', '.join(whole.compare)})")
        theirs, ours = _calls_by_group(whole.rows), _calls_by_group(log.rows)
        if theirs != ours:
            raise ValueError(
                f"the whole-clip log is of another render: it has {_brief(theirs)}, this one {_brief(ours)}"
            )
    render_ms = sum(stage.seconds - stage.shadow_seconds for stage in base.stages) * 1e3
    groups = _grouped(log.rows)
    timed = groups if whole is None else _grouped(whole.rows)
    lines = [
        _line(stage, kind, timed[stage, kind], rows, log.compare, render_ms)
        for (stage, kind), rows in groups.items()
    ]
    total = _line(None, None, base.rows, log.rows, log.compare, render_ms)
    for name, arm in total.arms.items():
        # Each line has a ratio of its own, so the whole is the sum of the lines' effects.
        parts = [(line.total_ms, line.arms[name]) for line in lines]
        weights = [(ms, part.ratio) for ms, part in parts if part.ratio is not None]
        weight = sum(ms for ms, _ in weights)
        arm.ratio = sum(ms * ratio for ms, ratio in weights) / weight if weight else None
        changes = [part.whole_clip - 1 for _, part in parts if part.whole_clip is not None]
        arm.whole_clip = 1 + sum(changes) if changes else None
    return Report(
        device=log.device,
        compare=log.compare,
        clips=len({stage.clip for stage in base.stages}),
        clip_seconds=None if base.compare else _seconds(base.stages, "clip"),
        stage_seconds=None if base.compare else _seconds(base.stages, "stage"),
        share_is_estimate=bool(base.compare),
        lines=lines,
        total=total,
        notes=_notes(log, base, total),
    )


def _group(row: CallRow) -> tuple[str | None, str | None]:
    return row.stage, row.kind


def _grouped(rows: Iterable[CallRow]) -> dict[tuple[str | None, str | None], list[CallRow]]:
    """Rows by stage, in the order of the stages, and kind, in the order of `KINDS`."""
    groups: dict[tuple[str | None, str | None], list[CallRow]] = {}
    stages: dict[str | None, int] = {}
    for row in rows:
        stages.setdefault(row.stage, len(stages))
        groups.setdefault(_group(row), []).append(row)
    ranks: dict[str | None, int] = {kind: rank for rank, kind in enumerate(KINDS)}
    return dict(
        sorted(groups.items(), key=lambda item: (stages[item[0][0]], ranks.get(item[0][1], len(ranks))))
    )


def _calls_by_group(rows: Iterable[CallRow]) -> Counter[tuple[str | None, ...]]:
    return Counter(
        (row.stage, row.kind, f"{row.batch}×{row.heads}×{row.q_len}×{row.kv_len}×{row.head_dim}")
        for row in rows
    )


def _brief(calls: Counter[tuple[str | None, ...]]) -> str:
    by_kind: Counter[str] = Counter()
    for (_, kind, *_), count in calls.items():
        by_kind[kind or "unnamed"] += count
    return ", ".join(f"{count} {kind}" for kind, count in by_kind.items()) or "none"


def _line(
    stage: str | None,
    kind: str | None,
    timed: list[CallRow],
    compared: list[CallRow],
    compare: tuple[str, ...],
    render_ms: float,
) -> Line:
    total_ms = sum(row.milliseconds or 0.0 for row in timed)
    clean = [row for row in timed if row.mark is None and row.milliseconds and row.flops is not None]
    clean_ms = sum(row.milliseconds or 0.0 for row in clean)
    share = total_ms / render_ms if render_ms > 0 else None
    line = Line(
        stage=stage,
        kind=kind,
        calls=len(timed),
        kernels=dict(Counter(row.kernel for row in timed).most_common()),
        total_ms=total_ms,
        marked=sum(row.mark is not None for row in timed),
        tflops=sum(row.flops or 0 for row in clean) / clean_ms / 1e9 if clean_ms else None,
        share=share,
        ceiling=1 / (1 - share) if share is not None and share < 1 else None,
    )
    for name in compare:
        line.arms[name] = _arm_line(name, compared, share)
    return line


def _arm_line(name: str, rows: list[CallRow], share: float | None) -> ArmLine:
    pairs = [(row, row.arms[name]) for row in rows if name in row.arms]
    served = [(row, arm) for row, arm in pairs if arm.reason is None]
    ratios = [arm.ratio for _, arm in served if arm.ratio is not None]
    ratio = median(ratios) if ratios else None
    not_finite = sum(not arm.finite for _, arm in served)
    differences = [arm.max_abs_diff for _, arm in served if arm.max_abs_diff is not None]
    served_share = None if share is None else share * len(served) / max(1, len(pairs))
    return ArmLine(
        calls=len(ratios),
        ratio=ratio,
        max_abs_diff=max(differences) if differences and not not_finite else None,
        not_finite=not_finite,
        whole_clip=1 + served_share * (ratio - 1) if served_share is not None and ratio is not None else None,
        refused=dict(Counter(arm.reason for _, arm in pairs if arm.reason is not None).most_common()),
    )


def _seconds(stages: Iterable[StageTime], attribute: str) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for stage in stages:
        name = getattr(stage, attribute) or ""
        seconds[name] = seconds.get(name, 0.0) + stage.seconds
    return seconds


def _notes(log: TimingLog, base: TimingLog, total: Line) -> list[str]:
    notes = [f"Around the calls: {base.around}."] if base.around else []
    if base.compare:
        notes.append(
            "Shadow arms ran, so no clip seconds are given: the arms change clock and power. Shares and "
            "ceilings are estimates from this run's time less the arms'; a run without arms measures them."
        )
    gaps = sum(row.mark == "launch gap" for row in base.rows)
    if gaps:
        notes.append(
            f"{gaps} of {total.calls} calls were too short to time by events, which then measure the wait "
            "for the launch: they are in the totals, not in TFLOP/s or ratios."
        )
    captured = sum(row.mark == "graph capture" for row in base.rows)
    if captured:
        notes.append(
            f"{captured} calls were captured into a CUDA graph, whose replays have no time per call: totals "
            f"and shares leave them out. {_forwards(base.forwards)}"
        )
    replayed = [forward for forward in base.forwards if forward.replayed_calls]
    if replayed:
        calls = sum(forward.replayed_calls for forward in replayed)
        notes.append(
            f"{len(replayed)} forwards replayed a CUDA graph: their {calls} attention calls have no time of "
            f"their own, totals and shares leave them out. {_forwards(replayed)}"
        )
    for name, arm in total.arms.items():
        for reason, count in arm.refused.items():
            notes.append(f"{name} did not run on {count} of {len(log.rows)} calls: {reason}.")
        if arm.not_finite:
            notes.append(f"{name} differs by NaN or Inf on {arm.not_finite} calls.")
    return notes


def _forwards(forwards: Sequence[ForwardTime]) -> str:
    if not forwards:
        return "Wrap each forward in recording.forward() to time it whole."
    middle = median(forward.milliseconds for forward in forwards)
    return f"{len(forwards)} forwards were timed whole, median {middle:.2f} ms."


def _calls_table(report: Report) -> RenderableType:
    table = _table(f"Attention calls on {report.device}")
    table.add_column("kind", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    share = "≈share" if report.share_is_estimate else "share"
    for name in ("calls", "marked", "total ms", "TFLOP/s", share, "ceiling"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, line in _labelled(report, table):
        table.add_row(
            label,
            _kernels(line.kernels),
            str(line.calls),
            str(line.marked or ""),
            f"{line.total_ms:.1f}",
            _number(line.tflops, ".1f" if (line.tflops or 0) >= 10 else ".2g"),
            _number(line.share, ".1%"),
            _number(line.ceiling, ".2f", "×"),
        )
    if report.clip_seconds is not None:
        total = sum(report.clip_seconds.values())
        stages = ", ".join(f"{name or '–'} {s:.2f}" for name, s in (report.stage_seconds or {}).items())
        clips = "" if report.clips == 1 else f" for {report.clips} clips"
        table.caption = f"{total:.2f} s{clips}: {stages}"
    return table


def _arms_table(report: Report) -> RenderableType:
    table = _table("Shadow arms: time of the arm over time of the kernel, median")
    table.add_column("kind", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    for name in ("compared", "ratio", "max|diff|", "whole clip"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, line in _labelled(report, table):
        for name, arm in line.arms.items():
            table.add_row(
                label,
                name,
                f"{arm.calls} of {line.calls}",
                _number(arm.ratio, ".3f", "×"),
                "not finite" if arm.not_finite else _number(arm.max_abs_diff, ".1e"),
                _number(arm.whole_clip, ".3f", "×"),
            )
    table.caption = "whole clip: its predicted time with the arm in place of the kernel, over its time now"
    return table


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    # Narrow enough for a terminal of 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    return table


def _labelled(report: Report, table: Table) -> Iterator[tuple[str, Line]]:
    """Each line with its label; a stage's name goes into the table before its first line."""
    from rich.text import Text

    stage: object = report
    for line in report.lines:
        if line.stage != stage:
            stage = line.stage
            table.add_row(Text(line.stage or "–", "bold"))
        yield f"  {line.kind or '–'}", line
    table.add_section()
    yield "all", report.total


def _kernels(kernels: dict[str, int]) -> str:
    return "\n".join(kernels if len(kernels) < 2 else (f"{name} ×{count}" for name, count in kernels.items()))


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
