"""One attempt, told turn by turn: what its rows and its segments say, for a terminal, a page or a machine.

Reads only. Who calls it reads the segments and brings the words of their tokens, which are another layer's. Called by
`ratchet episode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session

from storage import archive, queries
from storage.report.parts import Part
from storage.report.turns import Texts, TurnPart, told_turns
from storage.scores import Scores, scores_key
from storage.tables import Batch, BatchMember, Episode, PolicyVersion, Replay, Run, Task, Turn
from workflows.contracts import Segment


class UsePart(Part):
    """A batch that the attempt trained. `replayed`: once more, as an archived success beside a later group."""

    batch: str
    step: int
    state: str
    reason: str
    group: str
    advantage: float | None
    replayed: bool


class EpisodePart(Part):
    """Everything about one attempt; `ratchet episode --json` prints it."""

    attempt_id: str
    episode_id: str
    group_id: str
    run: str
    model: str
    kind: str
    task: str
    instruction: str
    attempt: int
    others: dict[str, str]
    """The other attempts at this episode, and how each ended."""
    outcome: str
    stop_reason: str
    why: str
    reward: float | None
    tampered: bool
    evidence: dict[str, Any]
    replays: int
    image_id: str
    seed: int
    min_version: int | None
    max_version: int | None
    sampled_tokens: int
    sequence_tokens: int
    seconds: dict[str, float]
    """`queue`, `boot`, `generate`, `act`, `verify`, and `all` from its start to its end."""
    started_at: float
    uses: list[UsePart]
    versions: list[int]
    """Versions whose weights it helped to make, first to last."""
    checkpoint: str
    """Key of the manifest of the training state that it went into; empty for none."""
    ui: str
    """Its workflow in the Temporal UI."""
    notes: list[str]
    turns: list[TurnPart]


@dataclass(frozen=True)
class EpisodeRows:
    """What the database holds of one attempt."""

    episode: Episode
    turns: list[Turn]
    run: Run
    instruction: str
    others: list[Episode]
    uses: list[UsePart]
    versions: list[int]
    checkpoint: str
    scores_key: str
    """Where the trainer's log-probabilities of its tokens are; empty where it was in no batch."""

    @property
    def model(self) -> str:
        return str(self.run.config.get("model", ""))


def read_rows(opened: Session, episode: str) -> EpisodeRows:
    """The rows of an attempt, or of an episode's last one. Raises NotFound saying how ids look."""
    row, batch, versions = queries.episode_fate(opened, episode=episode)
    task = opened.get(Task, row.task)
    member = queries.member_of(opened, attempt=row.id)
    uses = [_use(batch, member)] if batch and member else []
    for use, _ in archive.uses_of(opened, attempt=row.id):
        uses.append(_use(opened.get_one(Batch, use.batch), use))
    made = opened.get(PolicyVersion, (row.run, versions[0])) if versions else None
    return EpisodeRows(
        episode=row,
        turns=queries.turns_of(opened, attempt=row.id),
        run=queries.run_row(opened, run=row.run),
        instruction=task.instruction if task else "",
        others=[item for item in queries.attempts_of(opened, episode=row.episode_id) if item.id != row.id],
        uses=uses,
        versions=versions,
        checkpoint=(batch.checkpoint if batch else "") or (made.checkpoint if made else ""),
        scores_key=scores_key(row.run, batch.step, batch.fence) if batch and member else "",
    )


def _use(batch: Batch, use: BatchMember | Replay) -> UsePart:
    return UsePart(
        batch=batch.id,
        step=batch.step,
        state=batch.state,
        reason=batch.reason,
        group=use.group_id,
        advantage=use.advantage,
        replayed=isinstance(use, Replay),
    )


def tell(
    rows: EpisodeRows,
    segments: Mapping[int, Segment | str],
    texts: Texts | None,
    *,
    scores: Scores | None = None,
    ui: str = "",
    notes: Sequence[str] = (),
) -> EpisodePart:
    """The whole. `segments`: by turn, its tokens or why there are none; `texts` is None where the tokenizer is gone;
    `scores` are those of the batch that the attempt trained."""
    row = rows.episode
    return EpisodePart(
        attempt_id=row.id,
        model=rows.model,
        instruction=rows.instruction,
        others={item.id: f"{item.outcome}, {item.stop_reason}" for item in rows.others},
        seconds=_seconds(row),
        uses=rows.uses,
        versions=rows.versions,
        checkpoint=rows.checkpoint,
        ui=ui,
        notes=list(notes),
        turns=told_turns(row.id, rows.turns, segments, texts, scores),
        **row.model_dump(include=set(EpisodePart.model_fields) - {"id"}),
    )


def _seconds(row: Episode) -> dict[str, float]:
    parts = {name: float(getattr(row, f"{name}_s")) for name in ("queue", "boot", "generate", "act", "verify")}
    return parts | {"all": row.ended_at - row.started_at}
