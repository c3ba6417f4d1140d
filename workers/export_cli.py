"""`ratchet export`: a run's tables as Parquet for whoever analyses them, its curves for TensorBoard or MLflow.

Reads only what is asked for and writes one folder, whole or not at all. Exit code 1 for a run that is not there, for a
folder that it must not or can't write, and for a server that can't be reached or refuses. `register` is called by the
command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from storage.mlflow import Gathered


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(export)


def export(
    run: Annotated[str, typer.Argument(help="Workflow id of the run.")],
    to: Annotated[Path | None, typer.Option(help="Folder to make; it must be empty where it exists.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in that folder.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the metrics of every step as TensorBoard event files, too.")
    ] = False,
    mlflow: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send metrics and configuration to this MLflow server; a second time, what is new. Token:"
            " MLFLOW_TRACKING_TOKEN.",
        ),
    ] = "",
) -> None:
    """Every table's rows of a run as Parquet files, one per table; its metrics for other tools."""
    if to is None and not mlflow:
        raise typer.BadParameter("name a folder with --to, or a server with --mlflow", param_hint="--to")
    if to is None and (force or tensorboard):
        raise typer.BadParameter("goes with a folder: --to", param_hint="--force" if force else "--tensorboard")
    gathered, token = _read(run, to, force, tensorboard, bool(mlflow))
    if gathered is not None:
        _send(gathered, mlflow, token)


def _read(run: str, to: Path | None, force: bool, tensorboard: bool, wanted: bool) -> tuple[Gathered | None, str]:
    """Write the folder; what a server is to get, if one is, and the token for it."""
    from storage.export import SCALARS, export_run
    from storage.mlflow import gather
    from workers.lineage_cli import opened_lineage

    with opened_lineage() as (opened, settings):
        counts = {} if to is None else export_run(opened, run=run, to=to, force=force, tensorboard=tensorboard)
        gathered = gather(opened, run=run) if wanted else None
    if to is not None:
        for table, rows in counts.items():
            typer.echo(f"{to / f'{table}.parquet'}  {rows}")
        if tensorboard:
            typer.echo(f"tensorboard --logdir {to / SCALARS}")
    return gathered, settings.mlflow_tracking_token.get_secret_value()


def _send(gathered: Gathered, url: str, token: str) -> None:
    """Once the database is closed: nobody waits for a server."""
    from storage.mlflow import send
    from workflows.errors import RatchetError

    try:
        sent = send(gathered, url=url, token=token)
    except RatchetError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"MLflow experiment {sent.experiment_id}, run {sent.run_id}: {sent.metrics} new values")
