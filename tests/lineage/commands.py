"""The commands that read the lineage, as a person runs them."""

from __future__ import annotations

import typer
from click.testing import Result
from typer.testing import CliRunner

from workers import episode_cli, evaluation_cli, export_cli, lineage_cli, quarantine_cli, report_cli


def ratchet(*argv: str, code: int = 0) -> Result:
    app = typer.Typer()
    for module in (lineage_cli, quarantine_cli, report_cli, episode_cli, export_cli, evaluation_cli):
        module.register(app)
    result = CliRunner().invoke(app, list(argv))
    assert result.exit_code == code, result.output
    return result
