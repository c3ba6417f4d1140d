"""`ratchet evaluation`: how good a policy is on held-out tasks, how sure that is, on what it was measured, and whether
that still serves; one result, or two side by side.

Reads only. Exit code 1 for a name that is not there, and for two results without a task in common. `register` is called
by the command line.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

PIPE_COLUMNS = 150


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(evaluation)


def evaluation(
    name: Annotated[
        str, typer.Argument(metavar="RUN|ID", help="A run, for its newest result; or an evaluation, by id or workflow.")
    ],
    against: Annotated[
        str, typer.Option(metavar="RUN|ID", help="Compare with this one, task by task: it less the first.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON and nothing else.")] = False,
) -> None:
    """Held-out reward with its interval, pass@k, tasks and serving fingerprint; with --against a paired comparison."""
    from rich.console import Console

    from storage import evaluations
    from storage.report import evaluation_parts, evaluation_terminal
    from workers.lineage_cli import opened_lineage

    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    with opened_lineage() as (opened, _):
        if against:
            first, second = evaluations.pair(opened, name=name, against=against)
            compared = evaluation_parts.compared(opened, first, second)
            if as_json:
                typer.echo(compared.model_dump_json(indent=2))
            else:
                evaluation_terminal.render_comparison(compared, console)
            return
        first = evaluations.resolve(opened, name=name)
        items = evaluation_parts.measured(opened, run=first.run)
        shown = evaluation_parts.with_tasks(opened, first)
        again = evaluations.another(opened, run=first.run, like=first)
    if as_json:
        typer.echo(shown.model_dump_json(indent=2))
    else:
        evaluation_terminal.render_evaluations(items, shown, again, console)
