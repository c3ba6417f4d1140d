"""`ratchet episode`: one attempt, turn by turn and token by token, at a terminal, as a page or as JSON.

Reads only: the database, the object store where its tokens are, and the run's tokenizer. What is gone is said in its
place. Exit code 1 for an id that is not there. `register` is called by the command line.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

if TYPE_CHECKING:
    from storage.report.episode import EpisodePart, EpisodeRows
    from workers.settings import Settings

PIPE_COLUMNS = 100


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(episode)


def episode(
    episode: Annotated[str, typer.Argument(help="Id of an attempt, or of an episode for its last attempt.")],
    html: Annotated[Path | None, typer.Option(help="Write it as a page there.", dir_okay=False)] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show every token in figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON and nothing else.")] = False,
) -> None:
    """What one episode saw, said and did, what it was worth, and which checkpoint it trained."""
    from rich.console import Console

    from storage.report.episode import read_rows
    from storage.report.episode_page import render_episode_html
    from storage.report.episode_terminal import render_episode
    from workers.lineage_cli import opened_lineage, write_page

    with opened_lineage() as (opened, settings):
        rows = read_rows(opened, episode)
    part = _tell(settings, rows)
    if as_json:
        typer.echo(part.model_dump_json(indent=2))
    else:
        render_episode(part, Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS), tokens=tokens)
    if html is not None:
        write_page(html, render_episode_html(part))
        typer.echo(str(html), err=as_json)


def _tell(settings: Settings, rows: EpisodeRows) -> EpisodePart:
    from storage.report.episode import tell
    from workers.parts import object_store
    from workers.token_texts import model_texts, read_segments, scores_of
    from workflows.contracts import Segment

    keys = {turn.turn: turn.segment for turn in rows.turns if turn.segment is not None}
    store = object_store(settings)
    segments = read_segments(store, keys) if keys else {}
    words = any(isinstance(segment, Segment) for segment in segments.values())
    texts, note = model_texts(rows.model, settings.home_path / "models") if words else (None, "")
    scores, unread = scores_of(store, rows.scores_key) if words and rows.scores_key else (None, "")
    notes = [found for found in (note, unread) if found]
    return tell(rows, segments, texts, scores=scores, ui=_ui(settings, rows), notes=notes)


def _ui(settings: Settings, rows: EpisodeRows) -> str:
    """Its workflow in the Temporal UI; the attempt's id is the workflow's."""
    host = settings.temporal_address.rpartition(":")[0]
    namespace = rows.run.temporal_namespace.partition("/")[0] or settings.temporal_namespace
    path = f"namespaces/{quote(namespace, safe='')}/workflows/{quote(rows.episode.id, safe='')}"
    return f"http://{host}:{settings.temporal_ui_port}/{path}"
