"""`ratchet quarantine` and `ratchet audit`: rewards that were wrong, and those that look wrong.

`quarantine` writes marks into the database, then tells the runs that go on, by signal: they admit a marked task no
more. A run that can't be told has its marks all the same, and nothing that is marked trains. `audit` reads only. Exit
code 0: marked, and every run that goes on was told; nothing found. 1: not so, or no such id; findings. `register` is
called by the command line.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from storage.printable import one_line

if TYPE_CHECKING:
    from sqlmodel import Session

    from storage.quarantine import Target
    from storage.report.rewards import AffectedPart, MarkPart
    from storage.tables import Run
    from workers.settings import Settings
    from workflows.contracts import QuarantineOrder

TELL = timedelta(seconds=5)
WORDS = 60
"""Characters of the reason that a run's state keeps; the row has all of it."""


def register(app: typer.Typer) -> None:
    """Add the two commands to the command line."""
    app.command()(quarantine)
    app.command()(audit)


def quarantine(
    why: Annotated[str, typer.Option(help="The reason, for whoever reads the report; of the undoing, with --undo.")],
    task: Annotated[str, typer.Option(help="A task, as <taskset>/<task> or by its id: all its episodes.")] = "",
    episode: Annotated[
        list[str] | None, typer.Option(help="An episode or attempt, by its id; may be repeated.")
    ] = None,
    run: Annotated[str, typer.Option(help="Only in this run; default: in every run that has the task.")] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Take the mark back.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Mark rewards that were wrong, and list the batches and versions that trained on them."""
    if bool(task) == bool(episode):
        raise typer.BadParameter("name a task with --task, or episodes with --episode", param_hint="--task")
    if not why.strip():
        raise typer.BadParameter("say why: the report shows it", param_hint="--why")
    from workers.lineage_cli import opened_lineage

    with opened_lineage(to_write=True) as (opened, settings):
        by = f"{_person()}@{settings.host}"
        targets = _targets(opened, task, episode or [], run)
        marked = _undo(opened, targets, why, by) if undo else _mark(opened, targets, why, by)
    # The marks are written: what can be slow holds up nobody who writes.
    with opened_lineage() as (opened, settings):
        affected = _affected(opened, targets)
        orders = _orders(opened, targets, settings)
    told = asyncio.run(tell(settings, orders)) if orders else {}
    if as_json:
        typer.echo(_json(marked, affected, told))
    else:
        _show(marked, affected, told, undone=undo)
    for name, trouble in told.items():
        if trouble:
            typer.echo(f"run {name} could not be told: {trouble}; {_meanwhile(undo)}", err=True)
    if orders:
        _leave(1 if any(told.values()) else 0)


def audit(
    run: Annotated[str, typer.Argument(help="Workflow id of the run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON and nothing else.")] = False,
    limits: Annotated[
        Path | None,
        typer.Option(help="TOML file with other thresholds than those of storage/report/limits.toml.", dir_okay=False),
    ] = None,
) -> None:
    """Rewards that look wrong, by the rows alone, each with the command that puts them in quarantine."""
    from storage.queries import run_row
    from storage.report.limits import default_limits, read_limits
    from storage.report.rewards import findings
    from storage.report.rewards_terminal import finding_lines
    from workers.lineage_cli import opened_lineage

    with opened_lineage() as (opened, _):
        run = run_row(opened, run=run).id
        found = findings(opened, run, read_limits(limits) if limits else default_limits())
    if as_json:
        told = {"run": run, "findings": [item.model_dump(mode="json") for item in found]}
        typer.echo(json.dumps(told, indent=2))
    elif not found:
        typer.echo(f"{run}: no reward looks wrong")
    else:
        for item in found:
            for line in finding_lines(item):
                typer.echo(line)
            typer.echo()
        typer.echo(f"{run}: {len(found)} finding{'s' * (len(found) > 1)}, reasons to look and no proof")
    if found:
        raise typer.Exit(1)


class Marked(NamedTuple):
    """A mark, and whether this command made it, or undid it."""

    mark: MarkPart
    new: bool


def _targets(opened: Session, task: str, episodes: list[str], run: str) -> list[Target]:
    """Raises NotFound naming what there is."""
    from storage.quarantine import find_episode, find_task

    if task:
        return [find_task(opened, task=task, run=run)]
    return [find_episode(opened, episode=episode, run=run) for episode in dict.fromkeys(episodes)]


def _mark(opened: Session, targets: list[Target], why: str, by: str) -> list[Marked]:
    from storage.quarantine import put_mark
    from storage.report.rewards import mark_part

    found = [put_mark(opened, run=run, target=target, why=why, by=by) for target in targets for run in target.runs]
    return [Marked(mark_part(mark), new) for mark, new in found]


def _undo(opened: Session, targets: list[Target], why: str, by: str) -> list[Marked]:
    """Raises NotFound for a target that was never marked."""
    from storage.quarantine import holding, undo_mark
    from storage.queries import NotFound
    from storage.report.rewards import mark_part

    found = []
    for target in targets:
        undone = [undo_mark(opened, run=run, target=target, why=why, by=by) for run in target.runs]
        of_target = [Marked(mark_part(mark), new) for mark, new in undone if mark is not None]
        if not of_target:
            held = [f"{mark.kind} {mark.target}" for run in target.runs for mark in holding(opened, run=run)]
            there = f"in {', '.join(target.runs)} there are: {', '.join(dict.fromkeys(held)) or 'none'}"
            raise NotFound(f"no mark on {target.kind} {target.id}; {there}")
        found += of_target
    return found


def _affected(opened: Session, targets: list[Target]) -> list[AffectedPart]:
    """By run, what the targets together had a part in."""
    from sqlalchemy import or_

    from storage.affected import affected
    from storage.quarantine import covered_by
    from storage.report.rewards import affected_part

    which = or_(*(covered_by(target) for target in targets))
    runs = sorted({run for target in targets for run in target.runs})
    return [affected_part(affected(opened, run=run, which=which)) for run in runs]


# --- the runs that go on ----------------------------------------------------------------------------------------------


def _orders(opened: Session, targets: list[Target], settings: Settings) -> dict[str, tuple[QuarantineOrder, str]]:
    """By run that goes on: what it is to know, and why it can't be reached from here, empty where it may be."""
    from storage.queries import OVER, run_row
    from workflows.contracts import QuarantineOrder

    runs = sorted({run for target in targets for run in target.runs})
    going = [row for run in runs if (row := run_row(opened, run=run)).state not in OVER]
    orders = {row.id: (_order(opened, row, targets), _elsewhere(row, settings)) for row in going}
    return {run: order for run, order in orders.items() if order[0] != QuarantineOrder()}


def _order(opened: Session, row: Run, targets: list[Target]) -> QuarantineOrder:
    """What the rows say now of the targets: the same again where the command is repeated."""
    from storage.groups import barred
    from storage.quarantine import TASK, holding
    from workflows.contracts import QuarantineOrder

    held = {mark.target: one_line(mark.why) for mark in holding(opened, run=row.id) if mark.kind == TASK}
    # A run admits no held-out task anyway, and must not count it among those that it trains on.
    tasks = [target.id for target in targets if target.kind == TASK and not _held_out(opened, target.id)]
    return QuarantineOrder(
        tasks={_task_id(key): held[key][:WORDS] for key in tasks if key in held},
        released=[_task_id(key) for key in tasks if key not in held],
        groups=barred(opened, run=row.id),
    )


def _held_out(opened: Session, key: str) -> bool:
    from storage.tables import Task
    from workflows.contracts import Split

    row = opened.get(Task, key)
    return row is not None and row.split == Split.HELD_OUT


def _task_id(key: str) -> str:
    """`<task>` of `<taskset>/<task>`; a taskset that is a folder has slashes itself."""
    return key.rpartition("/")[2]


def _elsewhere(row: Run, settings: Settings) -> str:
    namespace = row.temporal_namespace.partition("/")[0]
    if namespace in ("", settings.temporal_namespace):
        return ""
    return f"it was started in the Temporal namespace {namespace}, and this is {settings.temporal_namespace}"


async def tell(settings: Settings, orders: dict[str, tuple[QuarantineOrder, str]]) -> dict[str, str]:
    """Signal each run. By run, why it could not be told; empty for one that was."""
    from temporalio.service import RPCError, RPCStatusCode

    from workers.temporal import connect

    told = {run: elsewhere for run, (_, elsewhere) in orders.items()}
    if all(told.values()):
        return told
    try:
        client = await connect(settings)
    except RuntimeError:
        nobody = f"no Temporal server answers at {settings.temporal_address}"
        return {run: elsewhere or nobody for run, elsewhere in told.items()}
    for run, (order, elsewhere) in orders.items():
        if elsewhere:
            continue
        try:
            await client.get_workflow_handle(run).signal("quarantine", order, rpc_timeout=TELL)
        except RPCError as error:
            gone = error.status is RPCStatusCode.NOT_FOUND
            told[run] = f"its workflow does not run in {settings.temporal_namespace}" if gone else error.message
    return told


def _leave(code: int) -> None:
    """End the process: the Temporal SDK's threads now and then abort an interpreter that ends in the ordinary way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _meanwhile(undo: bool) -> str:
    if undo:
        return "the mark is undone all the same; repeat the command when it answers, and it admits the task again"
    return (
        "its episodes are marked all the same, and what no batch has taken trains no more; repeat the command when it"
        " answers, so that it admits no more of the task"
    )


# --- what a person reads ----------------------------------------------------------------------------------------------


def _show(marked: list[Marked], affected: list[AffectedPart], told: dict[str, str], *, undone: bool) -> None:
    from storage.report.rewards_terminal import affected_lines, batch_lines, mark_line

    for mark, new in marked:
        now = ("no longer in quarantine" if new else "was undone before") if undone else "in quarantine"
        before = "" if new or undone else " already"
        typer.echo(f"{now}{before}: {mark_line(mark)}")
    for part in affected:
        typer.echo()
        for line in affected_lines(part):
            typer.echo(line)
        for line in batch_lines(part):
            typer.echo(line)
    for run in (run for run, trouble in told.items() if not trouble):
        typer.echo(f"run {run} was told")


def _json(marked: list[Marked], affected: list[AffectedPart], told: dict[str, str]) -> str:
    found = {
        "marks": [mark.model_dump(mode="json") | {"new": new} for mark, new in marked],
        "affected": [part.model_dump(mode="json") for part in affected],
        "told": {run: not trouble for run, trouble in told.items()},
    }
    return json.dumps(found, indent=2)


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A user id without a name, as in a container.
        return f"uid {os.getuid()}"
