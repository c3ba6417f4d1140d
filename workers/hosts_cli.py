"""`ratchet drain`, and what `ratchet status` says of the sandbox hosts: a word to each over the stack's server.

Exit code 1 where a host does not answer. `register` is called by the command line.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from workers.settings import Settings
    from workflows.contracts import HostStatus

PATIENCE = timedelta(seconds=20)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(drain)


def drain(
    host: Annotated[str, typer.Argument(help="Name of a sandbox host.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take sandboxes again.")] = False,
) -> None:
    """Let a sandbox host take no new sandbox; those that live there go on to their end. It stays so until --undo."""
    from workers.settings import Settings

    settings = Settings()
    known = settings.sandbox_host_names
    if known and host not in known:
        typer.echo(f"there is no sandbox host {host!r}; RATCHET_SANDBOX_HOSTS names {', '.join(known)}", err=True)
        raise typer.Exit(1)
    answer = ask(settings, [host], drain=not undo)[host]
    if isinstance(answer, str) and not known:
        answer += "; RATCHET_SANDBOX_HOSTS names none here (docs/operations.md has how hosts get their names)"
    typer.echo(f"{host}: {answer if isinstance(answer, str) else answer.words}", err=isinstance(answer, str))
    leave(1 if isinstance(answer, str) else 0)


def ask(settings: Settings, hosts: Sequence[str], *, drain: bool | None = None) -> dict[str, HostStatus | str]:
    """Each host's own account, or why there is none. `drain`: what it is told before."""
    return asyncio.run(_ask(settings, hosts, drain))


def leave(code: int) -> None:
    """End the process: the Temporal SDK's threads now and then abort an interpreter that ends in the ordinary way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _ask(settings: Settings, hosts: Sequence[str], drain: bool | None) -> dict[str, HostStatus | str]:
    from temporalio.client import WorkflowFailureError
    from temporalio.exceptions import TimeoutError
    from temporalio.service import RPCError

    from workers.temporal import connect
    from workflows.contracts import HostInput, HostStatus, Queue
    from workflows.failures import innermost, sentence

    try:
        client = await connect(settings)
    except RuntimeError as error:
        return dict.fromkeys(hosts, f"nobody can be asked: {error}")

    async def one(host: str) -> HostStatus | str:
        try:
            status: HostStatus = await client.execute_workflow(
                "SandboxHost",
                HostInput(host=host, drain=drain),
                id=f"sandbox-host/{host}/{uuid.uuid4().hex[:8]}",
                task_queue=Queue.CONTROL,
                result_type=HostStatus,
                execution_timeout=PATIENCE,
                static_summary=f"{host}: " + {True: "drain", False: "take sandboxes", None: "how it stands"}[drain],
            )
            return status
        except WorkflowFailureError as error:
            if error.cause is None or isinstance(innermost(error.cause), TimeoutError):
                return "silent: no worker of a sandbox host of this name answers"
            return f"silent: {sentence(error.cause)}"
        except RPCError as error:
            return f"can't be asked: {error}"

    return dict(zip(hosts, await asyncio.gather(*map(one, hosts)), strict=True))
