"""The turns of one attempt, told: what it saw, the tokens it made with their numbers, and what came of its command.

Called by storage/report/episode.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from statistics import fmean
from typing import Protocol

from storage.report.parts import Part
from storage.scores import Scores, by_turn
from storage.tables import Turn
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
    trainer_logprob: float | None = None
    """By the trainer, under the weights that the step it trained began with; None where nobody kept it."""

    @property
    def gap(self) -> float | None:
        """Trainer's less engine's, in nats."""
        if self.trainer_logprob is None or self.logprob is None:
            return None
        return self.trainer_logprob - self.logprob


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
    trainer_version: int | None = None
    """Version of the weights under which the trainer scored the tokens; None where nobody kept that."""


def told_turns(
    attempt: str,
    turns: Sequence[Turn],
    segments: Mapping[int, Segment | str],
    texts: Texts | None,
    scores: Scores | None,
) -> list[TurnPart]:
    """Each turn of an attempt. `segments`: by turn, its tokens or why there are none; `texts` is None where the
    tokenizer is gone; `scores` are those of the batch that the attempt trained."""
    found, before = [], None
    scored = _scored(attempt, segments, scores)
    for row in turns:
        segment = segments.get(row.turn, "the turn has no segment: its context was full")
        tokens = _tokens(segment, texts, scored.get(row.turn)) if isinstance(segment, Segment) else []
        found.append(
            TurnPart(
                missing="" if isinstance(segment, Segment) else segment,
                ran=row.exit_code is not None or row.timed_out or bool(row.output_digest),
                temperature=segment.temperature if isinstance(segment, Segment) else None,
                before=_before(segment, before, tokens, texts) if isinstance(segment, Segment) else None,
                text=segment.text if isinstance(segment, Segment) else None,
                tokens=tokens,
                spans=_spans(tokens),
                trainer_version=scores.policy_version if scores and row.turn in scored else None,
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


def _scored(attempt: str, segments: Mapping[int, Segment | str], scores: Scores | None) -> dict[int, list[float]]:
    """By turn, the trainer's figures of its sampled tokens; nothing where a segment is gone that would say whose."""
    whole = {turn: segment for turn, segment in segments.items() if isinstance(segment, Segment)}
    try:
        return by_turn(whole, scores.logprobs.get(attempt, [])) if scores else {}
    except ValueError:
        return {}


def _tokens(segment: Segment, texts: Texts | None, scored: Sequence[float] | None) -> list[TokenPart]:
    rest = iter(scored or ())
    pieces = texts.pieces(segment.token_ids) if texts is not None else [None] * len(segment.token_ids)
    marks = zip(segment.token_ids, segment.loss_mask, segment.logprobs, segment.versions, pieces, strict=True)
    return [
        TokenPart(
            id=token,
            text=piece,
            sampled=bool(mask),
            version=version if mask else None,
            logprob=logprob if mask else None,
            trainer_logprob=next(rest, None) if mask else None,
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
