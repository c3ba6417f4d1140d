"""Rewards that were wrong, or look it, in a terminal: for the report, `ratchet quarantine` and `ratchet audit`."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from storage.printable import one_line
from storage.report import words
from storage.report.rewards import AffectedPart, FindingPart, MarkPart, RewardsPart

SHOWN = 3
"""Attempts that a table names of a finding."""


def reward_tables(part: RewardsPart) -> list[Table]:
    """What the report shows; nothing where there is nothing to show."""
    return [table for table in (_marks(part), _findings(part)) if table.row_count]


def _table(title: str, caption: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _marks(part: RewardsPart) -> Table:
    caption = "\n".join(affected_lines(part.affected)) if part.affected.episodes or part.affected.evaluations else ""
    table = _table("Rewards in quarantine, by an operator's word", caption, "since", "what", "why", "by", "undone")
    for mark in part.marks:
        undone = "" if mark.undone_at is None else f"{words.moment(mark.undone_at)}, {mark.undone_by}"
        cells = (words.moment(mark.since), f"{mark.kind} {mark.target}", mark.why, mark.by, undone)
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def _findings(part: RewardsPart) -> Table:
    caption = f"reasons to look, no proof; each with its command: ratchet audit {part.affected.run}"
    table = _table("Rewards that look wrong", caption, "suspicion", "task", "why", "for example")
    for item in part.findings:
        cells = (words.plain(item.suspicion), item.task, _told(item), ", ".join(item.episodes[:SHOWN]))
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def _told(item: FindingPart) -> str:
    return f"{item.words}: {item.detail}" if item.detail else item.words


def mark_line(mark: MarkPart) -> str:
    """One mark in one line."""
    line = f"{mark.kind} {mark.target} in run {mark.run}: {mark.why} ({mark.by}, {words.moment(mark.since)})"
    if mark.undone_at is not None:
        line += f"; undone: {mark.undone_why} ({mark.undone_by}, {words.moment(mark.undone_at)})"
    return one_line(line)


def affected_lines(part: AffectedPart) -> Iterator[str]:
    """The share of the run, and what descends from it."""
    yield f"{part.run}: {words.affected(part)}"
    for item in part.versions:
        whose = "made with them or after them" if item.run == part.run else "of a run that went on from there"
        yield f"versions of {item.run}, {whose}: {words.spans(item.versions)}"
    if part.evaluations:
        yield f"evaluations that counted them: of version {words.spans(part.evaluations)}"


def batch_lines(part: AffectedPart) -> Iterator[str]:
    """One line per touched batch."""
    for item in part.batches:
        made = "" if item.version is None else f", made version {item.version}"
        yield (
            f"  {item.batch}  step {item.step}, {item.state}{made}: {item.episodes} of {item.of_episodes} episodes,"
            f" {item.tokens} of {item.of_tokens} sampled tokens"
        )


def finding_lines(item: FindingPart) -> Iterator[str]:
    """A finding with all its attempts, and its command on a line of its own to copy."""
    yield f"{words.plain(item.suspicion)}  {one_line(item.task)}"
    yield f"  {one_line(_told(item))}"
    yield f"  {', '.join(item.episodes)}"
    yield f"  {item.command}"
