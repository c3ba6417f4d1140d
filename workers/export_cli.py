"""`ratchet export`: a run's tables as Parquet for whoever analyses them, and its curves for TensorBoard.

Reads only what is asked for and writes one folder, whole or not at all. Exit code 1 for a run that is not there and for
a folder that it must not or can't write. `register` is called by the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(export)


def export(
    run: Annotated[str, typer.Argument(help="Workflow id of the run.")],
    to: Annotated[Path, typer.Option(help="Folder to make; it must be empty where it exists.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in that folder.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the metrics of every step as TensorBoard event files, too.")
    ] = False,
) -> None:
    """Every table's rows of a run as Parquet files, one per table."""
    from storage.export import SCALARS, export_run
    from workers.lineage_cli import opened_lineage

    with opened_lineage() as (opened, _):
        counts = export_run(opened, run=run, to=to, force=force, tensorboard=tensorboard)
    for table, rows in counts.items():
        typer.echo(f"{to / f'{table}.parquet'}  {rows}")
    if tensorboard:
        typer.echo(f"tensorboard --logdir {to / SCALARS}")
