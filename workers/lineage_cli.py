"""`ratchet lineage`: what the database remembers, for a person at a terminal or for a script.

Reads only. Identifiers are never broken over lines, so that scripts may cut them out. Exit code 1, with what there is
instead, for a run, version or episode that is not there. `register` is called by the command line; `opened_lineage` by
the other commands that read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from storage.printable import one_line

if TYPE_CHECKING:
    from rich.table import Table
    from sqlmodel import Session

    from storage.tables import Episode
    from workers.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(lineage)


def lineage(
    run: Annotated[str, typer.Argument(help="Workflow id of the run.")] = "",
    version: Annotated[int | None, typer.Option(min=0, help="List what trained this policy version.")] = None,
    episode: Annotated[str, typer.Option(help="Show one episode or attempt, by its id.")] = "",
) -> None:
    """Which episodes trained which version: of a run, of one version, or of one episode."""
    if bool(run) == bool(episode):
        raise typer.BadParameter("name a run, or an episode with --episode", param_hint="RUN")
    if episode and version is not None:
        raise typer.BadParameter("goes with a run, not with --episode", param_hint="--version")
    with opened_lineage() as (opened, _):
        if episode:
            _show_episode(opened, episode)
        elif version is None:
            _show_versions(opened, run)
        else:
            _show_version(opened, run, version)


@contextmanager
def opened_lineage(*, failing_with: int = 1, to_write: bool = False) -> Iterator[tuple[Session, Settings]]:
    """An open session on the stack's database, to read unless `to_write`. A failure is said in a sentence and ends the
    command with that code."""
    from storage.database import open_database, session
    from storage.reading import open_to_read
    from workers.settings import Settings
    from workflows.errors import RatchetError

    settings = Settings()
    url = settings.sql_url
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).is_file():
        typer.echo(f"no run has been recorded in {settings.home_path} yet; `ratchet up` starts a stack there", err=True)
        raise typer.Exit(failing_with)
    engine = open_database(url) if to_write else open_to_read(url)
    try:
        with session(engine) as opened:
            yield opened, settings
    except RatchetError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(failing_with) from None
    finally:
        engine.dispose()


def _show_versions(opened: Session, run: str) -> None:
    from storage import queries, series

    row = queries.run_row(opened, run=run)
    typer.echo(f"{row.id}: {row.state}, step {row.step}" + (f" ({row.reason})" if row.reason else ""))
    if row.resume_from:
        typer.echo(f"started from the last saved training state of {row.resume_from}")
    table = _table("version", "batch", "episodes", "groups", "reward", "held out", "published", "checkpoint")
    for item in series.versions(opened, run=run):
        size = (item.size.episodes, item.size.groups, item.size.mean_reward) if item.size else (0, 0, None)
        published = "-" if item.published_bytes is None else f"{item.published_bytes / 1e6:.1f} MB"
        cells = (item.version, item.batch, *size, item.held_out, published, item.checkpoint)
        table.add_row(*map(_cell, cells))
    _print(table)


def _show_version(opened: Session, run: str, version: int) -> None:
    from storage import queries

    rows = queries.episodes_behind(opened, run=run, version=version)
    if not rows:
        resumed = queries.run_row(opened, run=run).resume_from
        typer.echo(f"version {version} of {run} is where it began: no batch of this run trained it")
        if resumed:
            typer.echo(f"it came from the last saved training state of {resumed}; see: ratchet lineage {resumed}")
        return
    batches = len({batch.id for batch, _, _ in rows})
    typer.echo(f"version {version} of {run}: {len(rows)} episodes in {batches} batch{'es' * (batches > 1)} trained it")
    table = _table("episode", "task", "reward", "advantage", "versions", "batch")
    for batch, member, episode in rows:
        values = (episode.id, episode.task, episode.reward, member.advantage, _versions(episode), batch.id)
        table.add_row(*map(_cell, values))
    _print(table)


def _show_episode(opened: Session, episode_id: str) -> None:
    from storage import archive, quarantine, queries

    episode, batch, versions = queries.episode_fate(opened, episode=episode_id)
    others = queries.attempts_of(opened, episode=episode.episode_id)
    facts = _table("", "")
    facts.show_header = False
    rows = {
        "episode": f"{episode.id} ({episode.kind}, attempt {episode.attempt + 1} of {len(others)})",
        "task": episode.task,
        "ended": f"{episode.outcome}: {episode.stop_reason}" + (f", {episode.why}" if episode.why else ""),
        "reward": _cell(episode.reward),
        "made by version": _versions(episode),
        "tokens": f"{episode.sampled_tokens} sampled of {episode.sequence_tokens}",
        "sandbox image": episode.image_id or "-",
        "seed": str(episode.seed),
    }
    rows |= {f"evidence: {name}": str(value) for name, value in episode.evidence.items()}
    if (mark := quarantine.mark_on(opened, attempt=episode)) is not None:
        rows["in quarantine"] = one_line(f"its {mark.kind}: {mark.why} ({mark.by})")
    for name, value in rows.items():
        facts.add_row(one_line(name), one_line(value))
    member = queries.member_of(opened, attempt=episode.id)
    if batch is None or member is None:
        facts.add_row("trained", "no batch holds it")
    else:
        facts.add_row("batch", f"{batch.id} (step {batch.step}, {batch.state}, advantage {_cell(member.advantage)})")
        held = f"{versions[0]} and later, up to {versions[-1]}" if versions else batch.reason or "none yet"
        facts.add_row("in versions", held)
    for use, state in archive.uses_of(opened, attempt=episode.id):
        facts.add_row("replayed", f"{use.batch} ({state}) with {use.group_id}, advantage {_cell(use.advantage)}")
    for other in others:
        if other.id != episode.id:
            facts.add_row("other attempt", f"{other.id}: {other.outcome}, {other.stop_reason}")
    _print(facts)
    table = _table("turn", "engine", "versions", "prompt", "cached", "sampled", "finish", "exit", "action")
    for turn in queries.turns_of(opened, attempt=episode.id):
        values = (turn.turn, turn.engine, _span(turn.min_version, turn.max_version), turn.prompt_tokens)
        ending = "timed out" if turn.timed_out else _cell(turn.exit_code)
        action = " ".join(turn.action.split())
        counts = (turn.cached_tokens, turn.sampled_tokens, turn.finish_reason, ending, action)
        table.add_row(*map(_cell, values + counts))
    _print(table)


def write_page(path: Path, page: str) -> None:
    """Write a page with the folders that it is in. Ends the command with exit code 2 and one line where it can't be:
    1 would say that a run is not ready."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        typer.echo(
            f"{path}: the page can't be written: {error.strerror or error}; --html names another place", err=True
        )
        raise typer.Exit(2) from None


def _versions(episode: Episode) -> str:
    return _span(episode.min_version, episode.max_version)


def _span(low: int | None, high: int | None) -> str:
    return "-" if low is None or high is None else str(low) if low == high else f"{low}-{high}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else one_line(str(value))


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _print(table: Table) -> None:
    """As wide as its content: a narrow terminal folds the line itself, and nothing is cut."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    needed = Console(width=10_000, markup=False, highlight=False).measure(table).maximum
    console.width = max(console.width, needed)
    console.print(table)
