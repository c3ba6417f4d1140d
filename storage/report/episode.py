"""One attempt, told turn by turn: what its rows and its segments say, for a terminal, a page or a machine.

Reads only. Who calls it reads the segments and brings the words of their tokens, which are another layer's. Called by
`ratchet episode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from statistics import fmean
from typing import Any, Protocol

from sqlmodel import Session

from storage import archive, queries
from storage.report.parts import Part
from storage.tables import Batch, BatchMember, Episode, PolicyVersion, Replay, Run, Task, Turn
from workflows.contracts import Segment


class Texts(Protocol):
    """The words of a model's tokens."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One piece per token, which make the text together; empty for a special token or half a character."""

    def observation(self, answer: Segment, following: Segment) -> str:
        """What the agent saw between two turns, without what the chat template puts around it."""


class TokenPart(Part):
    """One token. `logprob` is None where it was not sampled."""

    id: int
    text: str | None
    """None where the model's tokenizer is gone."""
    sampled: bool
    """What the loss mask says: sampled tokens train, all others do not."""
    version: int | None
    logprob: float | None


class SpanPart(Part):
    """Sampled tokens in a row from one version. `first` is the first one's place among the turn's tokens."""

    version: int
    first: int
    tokens: int
    logprob_mean: float
    logprob_min: float


class TurnPart(Part):
    turn: int
    engine: str
    min_version: int
    max_version: int
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, those that the engine had in its cache."""
    sampled_tokens: int
    finish_reason: str
    action: str
    """The start of the action."""
    ran: bool
    """Whether a command ran."""
    exit_code: int | None
    timed_out: bool
    output_digest: str
    generate_s: float
    act_s: float
    queue_s: float
    segment: str | None
    missing: str
    """Why the tokens can't be shown; empty where they can."""
    temperature: float | None
    before: str | None
    """What the agent saw before it answered: the prompt, or what its last command put out."""
    text: str | None
    """What was sampled."""
    tokens: list[TokenPart]
    spans: list[SpanPart]


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
    ui: str = "",
    notes: Sequence[str] = (),
) -> EpisodePart:
    """The whole. `segments`: by turn, its tokens or why there are none; `texts` is None where the tokenizer is gone."""
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
        turns=_turns(rows, segments, texts),
        **row.model_dump(include=set(EpisodePart.model_fields) - {"id"}),
    )


def _seconds(row: Episode) -> dict[str, float]:
    parts = {name: float(getattr(row, f"{name}_s")) for name in ("queue", "boot", "generate", "act", "verify")}
    return parts | {"all": row.ended_at - row.started_at}


def _turns(rows: EpisodeRows, segments: Mapping[int, Segment | str], texts: Texts | None) -> list[TurnPart]:
    found, before = [], None
    for row in rows.turns:
        segment = segments.get(row.turn, "the turn has no segment: its context was full")
        tokens = _tokens(segment, texts) if isinstance(segment, Segment) else []
        found.append(
            TurnPart(
                missing="" if isinstance(segment, Segment) else segment,
                ran=row.exit_code is not None or row.timed_out or bool(row.output_digest),
                temperature=segment.temperature if isinstance(segment, Segment) else None,
                before=_before(segment, before, tokens, texts) if isinstance(segment, Segment) else None,
                text=segment.text if isinstance(segment, Segment) else None,
                tokens=tokens,
                spans=_spans(tokens),
                **row.model_dump(include=set(TurnPart.model_fields)),
            )
        )
        before = segment if isinstance(segment, Segment) else None
    return found


def _before(segment: Segment, last: Segment | None, tokens: list[TokenPart], texts: Texts | None) -> str | None:
    """What the agent saw first: of turn 0 the prompt, of a later one the observation where the turn before is there."""
    if texts is None:
        return None
    if last is not None and any(segment.loss_mask) and last.token_ids:
        return texts.observation(last, segment)
    return "".join(token.text or "" for token in takewhile(lambda token: not token.sampled, tokens))


def _tokens(segment: Segment, texts: Texts | None) -> list[TokenPart]:
    pieces = texts.pieces(segment.token_ids) if texts is not None else [None] * len(segment.token_ids)
    marks = zip(segment.token_ids, segment.loss_mask, segment.logprobs, segment.versions, pieces, strict=True)
    return [
        TokenPart(
            id=token,
            text=piece,
            sampled=bool(mask),
            version=version if mask else None,
            logprob=logprob if mask else None,
        )
        for token, mask, logprob, version, piece in marks
    ]


def _spans(tokens: list[TokenPart]) -> list[SpanPart]:
    found, place = [], 0
    for version, group in groupby(tokens, key=lambda token: token.version):
        part = list(group)
        if version is not None:
            logprobs = [token.logprob or 0.0 for token in part]
            found.append(
                SpanPart(
                    version=version,
                    first=place,
                    tokens=len(part),
                    logprob_mean=fmean(logprobs),
                    logprob_min=min(logprobs),
                )
            )
        place += len(part)
    return found
