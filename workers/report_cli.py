"""`ratchet report` and `ratchet compare`: a run judged and told, and several side by side, for people and for scripts.

Read only. Exit code 1 for a run that is not there, and with `--check` for one that is not ready. `register` is called
by the command line.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from storage.report import Report

PIPE_COLUMNS = 100
COLUMNS_PER_RUN = 30


def register(app: typer.Typer) -> None:
    """Add the two commands to the command line."""
    app.command()(report)
    app.command()(compare)


def report(
    run: Annotated[str, typer.Argument(help="Workflow id of the run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON and nothing else.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Where the page goes; default: reports/ in the state folder.", dir_okay=False),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 when a verdict is not ready.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="With --check: not measured is not ready.")] = False,
    limits: Annotated[
        Path | None,
        typer.Option(help="TOML file with other limits than those of storage/report/limits.toml.", dir_okay=False),
    ] = None,
) -> None:
    """The report of a run: six questions before scaling with their verdicts, figures, and a page with its plots."""
    from rich.console import Console

    from storage.report import build_report, render_html, render_terminal
    from storage.report.limits import default_limits, read_limits
    from workers.lineage_cli import opened_lineage, write_page

    if strict and not check:
        raise typer.BadParameter("goes with --check", param_hint="--strict")
    with opened_lineage() as (opened, settings):
        made = build_report(opened, run, read_limits(limits) if limits else default_limits())
    if as_json:
        typer.echo(made.model_dump_json(indent=2))
    else:
        render_terminal(made, Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS))
    if html is not None or not as_json:
        path = html or settings.home_path / "reports" / f"{_file_name(run)}.html"
        write_page(path, render_html(made))
        typer.echo(str(path), err=as_json)
    if check and _failing(made, strict=strict):
        raise typer.Exit(1)


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Workflow ids of the runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
) -> None:
    """Runs side by side: rewards, times, failures, tokens, weight updates, and where their configurations differ."""
    from rich.console import Console

    from storage.report import comparison
    from workers.lineage_cli import opened_lineage

    if len(set(runs)) < len(runs) or len(runs) < 2:
        raise typer.BadParameter("name two different runs or more", param_hint="RUN")
    with opened_lineage() as (opened, _):
        made = comparison.compare(opened, runs)
    if as_json:
        typer.echo(made.model_dump_json(indent=2))
    else:
        width = None if sys.stdout.isatty() else PIPE_COLUMNS + COLUMNS_PER_RUN * (len(runs) - 2)
        comparison.render_comparison(made, Console(width=width))


def _failing(made: Report, *, strict: bool) -> bool:
    """Whether a verdict fails the check; names each that does."""
    from storage.printable import one_line

    failing = [item for item in made.readiness if item.verdict == "not ready" or (strict and item.verdict != "ready")]
    for item in failing:
        typer.echo(f"{item.verdict}: {item.topic}: {one_line('; '.join(item.why))}", err=True)
    return bool(failing)


def _file_name(run: str) -> str:
    """The run's name where it can be one of a file; otherwise with a mark, so that no two runs share a page."""
    name = re.sub(r"[^\w.-]+", "-", run).lstrip(".")
    return name if name == run else f"{name or 'run'}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"
