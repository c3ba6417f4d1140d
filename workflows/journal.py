"""What an attempt's sandbox has done so far: the commands, in order, that bring a fresh one to the same state.

Pure. Owns the rule of what can be replayed: a command that its time-out or a signal ended stopped somewhere that no
second run would meet again, so a journal that holds one is refused. What a command left behind without saying so (a
random number in a file) no comparison of outputs can see. Called by `AttemptSandbox`.
"""

from __future__ import annotations

import json

from workflows.contracts import ActInput, ActOutput, JournalEntry, ReplayInput, SandboxLease

PART_BYTES = 32 * 1024
"""Commands of one message: far enough below the largest payload for what else is in it."""


class Journal:
    def __init__(self, max_output_chars: int) -> None:
        self._max_output_chars = max_output_chars
        self._entries: list[JournalEntry] = []
        self.obstacle = ""
        """Why this journal can't be replayed; empty while it can."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, message: ActInput, out: ActOutput) -> None:
        if not self.obstacle:
            self.obstacle = _obstacle(message.turn, out)
        entry = JournalEntry(
            turn=message.turn,
            op_id=message.op_id,
            command=message.command,
            step_timeout_s=message.step_timeout_s,
            ending=f"exit {out.exit_code}, {out.total_bytes} bytes",
            output_digest=out.output_digest,
        )
        self._entries.append(entry)

    def parts(self) -> list[list[JournalEntry]]:
        """The entries in order, in as many pieces as fit a message each."""
        parts: list[list[JournalEntry]] = []
        room = 0
        for entry in self._entries:
            size = len(json.dumps(entry.command)) + 256
            if not parts or size > room:
                parts.append([])
                room = PART_BYTES
            parts[-1].append(entry)
            room -= size
        return parts

    def message(self, lease: SandboxLease, part: list[JournalEntry]) -> ReplayInput:
        return ReplayInput(lease=lease, entries=part, max_output_chars=self._max_output_chars)


def _obstacle(turn: int, out: ActOutput) -> str:
    if out.timed_out:
        return f"the command of turn {turn} had timed out, which can't be replayed"
    if out.exit_code is None:
        return f"the command of turn {turn} had no exit code, which can't be replayed"
    if not out.output_digest:
        return f"the output of turn {turn} was not recorded, so that a replay could not be compared"
    return ""
