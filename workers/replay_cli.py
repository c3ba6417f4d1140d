"""`ratchet replay`: run what an attempt did once more, in a fresh sandbox, and show where the outputs part.

Uses the stack's database, object store and Docker, and leaves nothing there, also when it is interrupted. Exit code 0:
everything agrees; 1: something differs; 2: it can't be replayed, and why; 130: interrupted. `register` is called by the
command line.
"""

from __future__ import annotations

import asyncio
import difflib
import signal
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from activities.replay.comparison import Ending
    from activities.replay.player import Played, PlayedTurn, PlayedVerdict
    from activities.replay.recorded import Recorded
    from workers.settings import Settings

DIFFERS, IMPOSSIBLE, INTERRUPTED = 1, 2, 130
SHOWN_DIGITS = 12


def register(app: typer.Typer) -> None:
    app.command()(replay)


def replay(
    episode: Annotated[str, typer.Argument(help="Id of an attempt, or of an episode for its last attempt.")],
    go_on: Annotated[bool, typer.Option("--all", help="Go on after the first difference.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Run an attempt's commands again in a fresh sandbox and show the first output that differs."""
    from workers.lineage_cli import opened_lineage
    from workflows.errors import RatchetError

    with opened_lineage(failing_with=IMPOSSIBLE) as (opened, settings):
        from activities.replay.recorded import read_rows

        rows = read_rows(opened, episode)
    try:
        from activities.replay.recorded import Recorded
        from workers.parts import object_store

        recorded = Recorded(rows, object_store(settings), settings.home_path / "models")
        if not as_json:
            _show_head(recorded)
        played = asyncio.run(_play(settings, recorded, go_on=go_on, quiet=as_json))
    except RatchetError as error:
        typer.echo(f"{rows.episode.id} can't be replayed: {error}", err=True)
        raise typer.Exit(IMPOSSIBLE) from None
    except (asyncio.CancelledError, KeyboardInterrupt):
        typer.echo("interrupted; its sandbox is removed", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(played.model_dump_json(indent=2))
    else:
        _show_end(played)
    if not played.agrees:
        raise typer.Exit(DIFFERS)


async def _play(settings: Settings, recorded: Recorded, *, go_on: bool, quiet: bool) -> Played:
    """Raises RatchetError; CancelledError after the first signal, once the sandbox is gone."""
    from activities.replay.player import Player
    from activities.sandbox.docker import DockerBackend
    from tasksets import open_taskset

    task = open_taskset(recorded.taskset).load(recorded.task_id)
    backend = DockerBackend(settings.docker_host, settings.home_path, settings.sandbox_slots)
    playing = asyncio.ensure_future(
        Player(backend, recorded, task).play(go_on=go_on, show=(lambda _: None) if quiet else _show_turn)
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Once: a second one would interrupt the removal.
        asyncio.get_running_loop().add_signal_handler(number, lambda: playing.cancelling() or playing.cancel())
    try:
        return await playing
    finally:
        await backend.aclose()


def _show_head(recorded: Recorded) -> None:
    row = recorded.episode
    typer.echo(f"{row.id}: task {row.task}, image {row.image_id or '-'}")
    typer.echo(f"it ended as {row.outcome}: {row.stop_reason}" + (f", {row.why}" if row.why else ""))
    if not recorded.commands:
        typer.echo("it ran no command")


def _show_turn(turn: PlayedTurn) -> None:
    first, *others = turn.command.splitlines()
    typer.echo(f"\nturn {turn.turn}  $ {first}")
    for line in others:
        typer.echo(f"          {line}")
    note = f" ({turn.note})" if turn.note else ""
    typer.echo(f"  recorded {turn.recorded}, replayed {turn.replayed}: {turn.match}{note}")
    if turn.replayed_output is None:
        return
    if turn.recorded_output is None:
        typer.echo(f"  recorded output {_digest(turn.recorded)}, whose text is nowhere")
        typer.echo(f"  replayed output {_digest(turn.replayed)}:")
        lines = turn.replayed_output.splitlines()
    else:
        texts = (turn.recorded_output.splitlines(), turn.replayed_output.splitlines())
        lines = list(difflib.unified_diff(*texts, "recorded", "replayed", lineterm=""))
        lines = lines or ["(what the agent saw of both is the same: they part in what was cut or unreadable)"]
    for line in lines:
        typer.echo(f"    {line}")


def _digest(ending: Ending) -> str:
    return f"sha256 {ending.digest[:SHOWN_DIGITS]}" if ending.digest else "without a digest"


def _show_end(played: Played) -> None:
    different = [str(turn.turn) for turn in played.turns if turn.match == "differs"]
    typer.echo()
    if played.verdict is not None:
        _show_verdict(played.verdict)
    else:
        typer.echo(f"not graded: {played.stopped or 'the attempt was not graded either'}")
    if different:
        typer.echo(f"differs at turn {', '.join(different)}")
    elif not played.agrees:
        typer.echo("differs in its reward")
    else:
        compared = sum(turn.match == "agrees" for turn in played.turns)
        typer.echo(f"agrees: {compared} of {len(played.turns)} commands could be compared, all ended as recorded")


def _show_verdict(verdict: PlayedVerdict) -> None:
    replayed = "none, it broke the verifier" if verdict.replayed is None else f"{verdict.replayed:g}"
    typer.echo(f"reward recorded {verdict.recorded:g}, replayed {replayed} ({verdict.detail})")
