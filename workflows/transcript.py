"""What a person sees of an episode in the Temporal UI: one-line summaries, and the transcript as current details.

Owned by the Episode workflow; bounded, so that a long episode stays readable and its state small.
"""

from __future__ import annotations

from temporalio import workflow

from workflows.attributes import shorten
from workflows.contracts import ActOutput, EpisodeRecord, GenerateOutput, TurnRecord, VerifyOutput

MAX_SHOWN_CHARS = 600
MAX_SHOWN_PARTS = 60


class Transcript:
    """Markdown that grows with the episode. The last parts stay when it gets long."""

    def __init__(self, attempt_id: str, task_id: str) -> None:
        self._head = f"**{attempt_id}** on task `{task_id}`"
        self._parts: list[str] = []
        self._last = ""

    def summary(self, turn: int) -> str:
        """Summary of the next generation: what it answers to."""
        return f"turn {turn}: {self._last}" if self._last else f"turn {turn}: first answer"

    def called(self, turn: TurnRecord) -> None:
        """A turn of an external program, once that has ended."""
        ending = "" if turn.exit_code is None else f" · exit {turn.exit_code}"
        title = f"**turn {turn.turn}** · {_versions(turn)} · {turn.sampled_tokens} tokens · {turn.engine}{ending}"
        self._add(title, turn.action)

    def answered(self, turn: int, out: GenerateOutput) -> None:
        self._add(f"**turn {turn}** · {_versions(out)} · {out.sampled_tokens} tokens · {out.engine}", out.text)

    def acted(self, turn: int, out: ActOutput) -> None:
        self._last = f"after {describe(out)}"
        self._add(f"turn {turn}: {describe(out)}", out.output)

    def note(self, turn: int, text: str) -> None:
        self._last = f"after a reminder: {shorten(text, 60)}"
        self._add(f"turn {turn}: reminder", text)

    def replayed(self, replays: int, commands: int, why: str) -> None:
        agree = f"{commands} commands replayed into a fresh sandbox, all ended as before"
        self._add(f"**sandbox lost** (loss {replays}); {agree}", why)

    def verified(self, out: VerifyOutput) -> None:
        self._add(f"**verdict**: {'passed' if out.passed else 'failed'}, reward {out.reward:g}", out.detail)

    def ended(self, record: EpisodeRecord) -> None:
        reward = "none" if record.reward is None else f"{record.reward:g}"
        self._add(f"**{record.outcome}** ({record.stop_reason}), reward {reward}", record.why)

    def _add(self, title: str, body: str) -> None:
        shown = body if len(body) <= MAX_SHOWN_CHARS else body[:MAX_SHOWN_CHARS] + " …"
        fenced = f"\n~~~~text\n{shown.strip()}\n~~~~" if shown.strip() else ""
        self._parts.append(title + fenced)
        left_out = len(self._parts) - MAX_SHOWN_PARTS
        head = self._head if left_out <= 0 else f"{self._head}\n\n({left_out} earlier parts left out)"
        workflow.set_current_details("\n\n".join([head, *self._parts[-MAX_SHOWN_PARTS:]]))


def _versions(made: GenerateOutput | TurnRecord) -> str:
    """Example: `v3`, or `v3-4` over a weight load."""
    first, last = made.min_version, made.max_version
    return f"v{first}" if first == last else f"v{first}-{last}"


def describe(out: ActOutput) -> str:
    """How a command ended, in a few words. Example: `exit 0, 14 ms`."""
    if out.timed_out:
        ending = "timed out"
    elif out.signal is not None:
        ending = f"signal {out.signal}"
    else:
        ending = f"exit {out.exit_code}"
    return f"{ending}, {out.command_s * 1000:.0f} ms"
