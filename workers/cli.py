"""The command line: `ratchet up | down | status | env | doctor | bootstrap | watch | lineage | report | replay`, more.

Thin: each command reads the settings, calls one function and prints. Heavy modules are imported by the command that
needs them, so that `ratchet --help` answers at once. Exit codes: 0 well, 1 not well, 2 wrong usage.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from workers.settings import Settings
    from workers.stack.state import Home, Stack
    from workers.stack.status import PartStatus

app = typer.Typer(
    name="ratchet",
    help="Reinforcement learning for language-model agents on durable workflows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

REGISTERED = ("lineage", "quarantine", "report", "episode", "export", "evaluation", "replay", "tasks", "hosts", "codec")
"""Commands with modules of their own, workers/<name>_cli.py."""

Port = Annotated[int | None, typer.Option(min=1, max=65535, show_default=False)]


@app.command()
def up(
    engines: Annotated[int | None, typer.Option(min=0, max=64, help="vLLM engines on this host.")] = None,
    parts: Annotated[str | None, typer.Option(help="Only these parts, comma-separated.")] = None,
    temporal_port: Port = None,
    temporal_http_port: Port = None,
    temporal_metrics_port: Port = None,
    ui_port: Port = None,
    s3_port: Port = None,
    engine_port: Port = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65000, help="Of the workers' metrics; 0: none.", show_default=False)
    ] = None,
) -> None:
    """Start the stack on this machine and wait until it is healthy. Remembers its options for the next time."""
    from workers.settings import UpOptions
    from workers.stack.control import StackError
    from workers.stack.control import up as bring_up

    given = {
        "engine_count": engines,
        "parts": parts,
        "temporal_port": temporal_port,
        "temporal_http_port": temporal_http_port,
        "temporal_metrics_port": temporal_metrics_port,
        "ui_port": ui_port,
        "s3_port": s3_port,
        "engine_port": engine_port,
        "metrics_port": metrics_port,
    }
    options = UpOptions.model_validate({name: value for name, value in given.items() if value is not None})
    home = _home()
    try:
        stack, already = bring_up(home, options, _say)
    except StackError as error:
        raise _fail(str(error)) from None
    typer.echo("already up" if already else "up")
    for line in _addresses(home, stack):
        typer.echo(line)


@app.command()
def down() -> None:
    """Stop the stack: workers drain first, then the servers. What it stored stays; `ratchet up` goes on from there."""
    from workers.stack.control import down as take_down

    typer.echo("down" if take_down(_home(), _say) else "already down")


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """How each part stands, and each sandbox host. Exit code 1 if one is not well."""
    from workers.stack.control import read_status

    found, settings = read_status(_home()), _settings()
    if as_json:
        typer.echo(found.model_dump_json(indent=2) if found else '{"parts": []}')
    elif found is None:
        typer.echo("down")
    else:
        _print_parts(found.parts)
    well = found is not None and found.good
    if found is not None and settings.sandbox_host_names and not as_json:
        from workers.hosts_cli import ask, leave

        answers = ask(settings, settings.sandbox_host_names)
        for name, answer in answers.items():
            typer.echo(f"sandbox host {name}: {answer if isinstance(answer, str) else answer.words}")
        leave(0 if well and not any(isinstance(answer, str) for answer in answers.values()) else 1)
    if not well:
        raise typer.Exit(1)


@app.command()
def env() -> None:
    """Lines for your shell, so that the `temporal` command finds this stack: eval "$(ratchet env)"."""
    from workers.stack.parts import tool

    settings = _settings()
    values = {
        "RATCHET_HOME": str(settings.home_path),
        "TEMPORAL_ADDRESS": settings.temporal_address,
        "TEMPORAL_NAMESPACE": settings.temporal_namespace,
        "RATCHET_TEMPORAL_UI": f"http://{settings.temporal_address.rpartition(':')[0]}:{settings.temporal_ui_port}",
    }
    for name, value in values.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    folder = str(Path(tool("temporal")).parent)
    typer.echo(f'export PATH={shlex.quote(folder)}:"$PATH"')


@app.command(name="build-id")
def build_id() -> None:
    """Version of this code's workflows in a worker deployment (RATCHET_DEPLOYMENT); see docs/operations.md."""
    from workers.versioning import build_id as of_this_code

    typer.echo(of_this_code(_settings()))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """What this machine has, what is missing and what to do about it. Exit code 1 if something needed is missing."""
    from workers.doctor import examine, render, to_json

    findings = examine(_settings())
    typer.echo(to_json(findings) if as_json else render(findings))
    if any(finding.needed and not finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def bootstrap(
    policy: Annotated[str, typer.Argument(help="tiny, smollm2 or smollm2-shell.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the supervised start of tiny and smollm2-shell.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder to make; default: models/ in the state folder.")] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="tiny learns from the oracles of this folder's tasks as well: tiny-FOLDER.")
    ] = None,
) -> None:
    """Make a starting policy; a finished one is kept as it is."""
    if policy not in ("tiny", "smollm2", "smollm2-shell"):
        raise typer.BadParameter(f"{policy!r}: there are tiny, smollm2 and smollm2-shell", param_hint="policy")
    if tasks is not None and policy != "tiny":
        raise typer.BadParameter(f"only tiny learns from tasks, not {policy}", param_hint="--tasks")
    name = f"tiny-{tasks.resolve().name}" if tasks is not None else policy
    folder = out or _settings().home_path / "models" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    if tasks is not None:
        from workers.bootstrap.tiny_tasks import bootstrap_tiny_tasks

        typer.echo(str(bootstrap_tiny_tasks(str(tasks), folder, seed, _say)))
        return
    name = policy.replace("-", "_")
    make = getattr(importlib.import_module(f"workers.bootstrap.{name}"), f"bootstrap_{name}")
    make(*((folder, _say) if policy == "smollm2" else (folder, seed, _say)))
    typer.echo(str(folder))


@app.command()
def watch(
    run: Annotated[str, typer.Argument(help="Workflow id of the run.")],
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 1.0,
) -> None:
    """Follow a run until it ends. Exit code 0 if it finished, 1 if it failed or was cancelled."""
    from workers.watch import watch_run

    code = watch_run(_settings(), run, every_s=every)
    sys.stdout.flush()
    # The Temporal SDK's threads now and then abort an interpreter that ends in the ordinary way.
    os._exit(code)


@app.command()
def align(
    model: Annotated[str, typer.Argument(help="A local Hugging Face folder, or the name of a bootstrapped policy.")],
    dtypes: Annotated[str, typer.Option(help="Of engine and trainer, comma-separated.")] = "float32,bfloat16",
    attention: Annotated[str, typer.Option(help="The trainer's, comma-separated.")] = "sdpa,eager",
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0.6,1,1.3",
    prompts: Annotated[int, typer.Option(min=1, max=256, help="Tasks that are answered.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Sampled per answer, at most.")] = 48,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Compare engine and trainer on the same tokens and weights, and say which setting agrees best. Exit code 1 if even
    that one is beyond training.max_mismatch_kl."""
    from workers.align_cli import run_align

    given = {
        "dtypes": dtypes.split(","),
        "attention": attention.split(","),
        "temperatures": temperatures.split(","),
        "prompts": prompts,
        "tokens": tokens,
    }
    raise typer.Exit(run_align(_settings(), model, given, as_json=as_json, say=_say))


def main() -> None:
    """Entry point of the `ratchet` command."""
    own = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    if not own.intersection(sys.argv[1:2]):
        # The commands of lineage bring the database along; nobody else waits for that.
        for name in REGISTERED:
            importlib.import_module(f"workers.{name}_cli").register(app)
    app()


def _home() -> Home:
    from workers.stack.state import Home

    return Home(_settings().home_path)


def _settings() -> Settings:
    from workers.settings import Settings

    return Settings()


def _addresses(home: Home, stack: Stack) -> list[str]:
    from workers.stack.state import LOOPBACK

    lines = [f"  state folder  {home.path}"]
    if stack.has("temporal"):
        lines.append(f"  Temporal      {stack.settings['temporal_address']}")
        lines.append(f"  Temporal UI   http://{LOOPBACK}:{stack.ports.ui}")
    if stack.has("s3"):
        lines.append(f"  S3            {stack.settings['s3_endpoint']}")
    if stack.has("vllm"):
        lines += [f"  engine        {pair}" for pair in stack.settings["engines"].split(",") if pair]
    if stack.has("temporal") and stack.ports.temporal != type(stack.ports)().temporal:
        lines.append('  for the temporal command: eval "$(ratchet env)"')
    return lines


def _print_parts(parts: list[PartStatus]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("part", "state", "pid", "uptime", "restarts", "address", "log"):
        table.add_column(column, overflow="fold", no_wrap=column in ("part", "pid", "uptime"))
    for part in parts:
        state = f"{part.state}: {part.detail}" if part.detail else str(part.state)
        uptime = _duration(time.time() - part.since) if part.since and part.pid else ""
        row = (part.name, state, str(part.pid or ""), uptime, str(part.restarts), part.address, part.log)
        table.add_row(*row, style=None if part.state.good else "bold red")
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _fail(message: str) -> typer.Exit:
    _say(message)
    return typer.Exit(1)
