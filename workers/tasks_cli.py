"""`ratchet tasks check`: is every task of a folder fit to train on?

Uses Docker and the state folder, needs no running stack, and leaves nothing but images there, also when it is
interrupted. Exit code 0: every task is fit; 1: some are not; 2: nothing could be checked, and why; 130: interrupted.
`register` is called by the command line.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from storage.printable import one_line

if TYPE_CHECKING:
    from activities.sandbox.docker import DockerBackend
    from activities.sandbox.trial import Checked, Show
    from tasksets.base import Taskset
    from workers.settings import Settings

UNFIT, IMPOSSIBLE, INTERRUPTED = 1, 2, 130

tasks = typer.Typer(help="Tasks before anybody trains on them.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(tasks, name="tasks")


@tasks.callback()
def _tasks() -> None:
    """Keeps `check` a command of its own, though it is the only one."""


@tasks.command()
def check(
    path: Annotated[str, typer.Argument(help="A folder of tasks, a task's own folder, or the name of a taskset.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Tasks at once.")] = 2,
    local_bases: Annotated[
        bool,
        typer.Option(
            "--local-bases",
            envvar="RATCHET_LOCAL_BASES",
            help="Where no registry is: a Debian made here stands in for debian, ubuntu and python.",
        ),
    ] = False,
) -> None:
    """Build each task, run its oracle and do nothing, grade twice; say which are broken, flaky, trivial or slow."""
    from tasksets import open_taskset
    from workers.settings import Settings
    from workflows.errors import RatchetError

    settings = Settings()
    try:
        taskset = open_taskset(path)
        checked = asyncio.run(_check(settings, taskset, limit, jobs, quiet=as_json, local_bases=local_bases))
    except RatchetError as error:
        typer.echo(one_line(f"{path} can't be checked: {error}"), err=True)
        raise typer.Exit(IMPOSSIBLE) from None
    except (asyncio.CancelledError, KeyboardInterrupt):
        typer.echo("interrupted; its sandboxes are removed", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(_json(taskset.name, checked))
    else:
        _show(checked)
    if not all(item.fit for item in checked):
        raise typer.Exit(UNFIT)


async def _check(
    settings: Settings, taskset: Taskset, limit: int | None, jobs: int, *, quiet: bool, local_bases: bool
) -> list[Checked]:
    """Raises RatchetError; CancelledError after the first signal, once the sandboxes are gone."""
    from activities.sandbox.docker import DockerBackend
    from activities.sandbox.trial import unsupported

    left_out: dict[str, list[str]] = getattr(taskset, "unsupported", {})
    ids = _ids(taskset)[:limit]
    backend = DockerBackend(settings.docker_host, settings.home_path, 2 * jobs, local_bases=local_bases)
    working = asyncio.ensure_future(_all(backend, taskset, ids, jobs, quiet=quiet))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Once: a second one would interrupt the removal.
        asyncio.get_running_loop().add_signal_handler(number, lambda: working.cancelling() or working.cancel())
    try:
        checked = await working
    finally:
        await backend.aclose()
    return [*checked, *(unsupported(task_id, reasons) for task_id, reasons in sorted(left_out.items()))]


async def _all(backend: DockerBackend, taskset: Taskset, ids: list[str], jobs: int, *, quiet: bool) -> list[Checked]:
    from activities.sandbox.trial import Trial

    trial, turns = Trial(backend), asyncio.Semaphore(jobs)

    async def one(number: int, task_id: str, show: Show) -> Checked:
        async with turns:
            checked = await trial.check(taskset.load(task_id), number, show)
            show(task_id, "")
            return checked

    with _progress(len(ids), quiet=quiet) as show:
        working = [asyncio.ensure_future(one(number, task_id, show)) for number, task_id in enumerate(ids)]
        try:
            return await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await backend.sweep(trial.run)


def _ids(taskset: Taskset) -> list[str]:
    from workflows.contracts import Split

    return [task_id for split in Split for task_id in taskset.ids(split)]


@contextmanager
def _progress(count: int, *, quiet: bool) -> Iterator[Show]:
    """Where it stands, on stderr: a bar for a person, nothing for a file."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    console, doing = Console(stderr=True), dict[str, str]()
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task("", total=count)

        def show(task_id: str, phase: str) -> None:
            if phase:
                doing[task_id] = phase
            elif doing.pop(task_id, None) is not None:
                progress.advance(bar)
            progress.update(bar, description=one_line(", ".join(f"{name}: {what}" for name, what in doing.items())))

        yield show


def _json(name: str, checked: list[Checked]) -> str:
    found = {
        "taskset": name,
        "fit": sum(item.fit for item in checked),
        "unfit": sum(not item.fit for item in checked),
        "tasks": [item.model_dump(mode="json") for item in checked],
    }
    return json.dumps(found, indent=2)


def _show(checked: list[Checked]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("task", "format", "", "nothing", "oracle", "again", "image s", "oracle s", "verifier s", "why"):
        table.add_column(column, overflow="fold", no_wrap=column in ("task", ""))
    for item in checked:
        words = "fit" if item.fit else ", ".join(finding.what for finding in item.findings)
        numbers = (item.nothing, item.oracle, item.again, item.image_s, item.oracle_s, item.verify_s)
        why = "; ".join(finding.why for finding in item.findings)
        shown = ("" if number is None else f"{number:g}" for number in numbers)
        cells = map(one_line, (item.task, item.format, words, *shown, why))
        table.add_row(*cells, style=None if item.fit else "red")
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)
    console.print(table)
    for line in _remarks(checked):
        typer.echo(line)


def _remarks(checked: list[Checked]) -> list[str]:
    """What is no fault of a task and should be known."""
    stood_in = sorted({name for item in checked for name in item.local_bases})
    notes = Counter(note for item in checked for note in item.notes)
    unfit = sum(not item.fit for item in checked)
    lines = [f"{len(checked) - unfit} of {len(checked)} tasks are fit"]
    if stood_in:
        lines.append(f"a Debian made here stood in for {', '.join(stood_in)}: versions differ from theirs")
    return lines + [f"{count} tasks: {note}" for note, count in notes.items()]
