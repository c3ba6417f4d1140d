"""The agent's commands as operations of a sandbox, and what of their results must be equal when they are run again.

Pure. Called by `SandboxActivities` when the agent acts and when its journal is replayed, and by `ratchet replay`.
"""

from __future__ import annotations

import hashlib

from activities.sandbox.channel import Operation, Person, Result
from activities.sandbox.text import cap_bytes


def agent_operation(
    op_id: str, command: str, *, timeout_s: float, max_output_chars: int, person: Person | None = None
) -> Operation:
    """The command under the key of its turn. A replay uses the same key, in another sandbox. `person` is the agent in
    a machine of its own."""
    return Operation(
        op_id=f"act-{op_id}",
        command=command,
        timeout_s=timeout_s,
        cap_bytes=cap_bytes(max_output_chars),
        person=person,
    )


def output_digest(result: Result) -> str:
    """SHA-256 over how the command ended, how much it printed, and the bytes that were kept; no time is in it.

    Head and tail count as one: where the channel cuts them apart is its own affair."""
    ending = f"{result.exit_code} {result.signal} {result.timed_out} {result.total_bytes}\n"
    return hashlib.sha256(ending.encode() + result.head + result.tail).hexdigest()
