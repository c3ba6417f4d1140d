"""What an attempt did, as lineage and the object store remember it.

Owns where each part comes from: endings and digests from the turns' rows, commands and the answer from the text that
was sampled (a row's `action` is cut short), observations from the prompt tokens that followed them. Called by
`ratchet replay`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from sqlmodel import Session

from activities.generation.harness import carried, observation_message, parse_action
from activities.replay.comparison import Ending
from storage import queries
from storage.objects import ObjectStore
from storage.tables import Episode, Turn
from workflows.config import RunConfig, model_folder
from workflows.contracts import EXTERNAL_HARNESS, SHELL_HARNESS, Action, ActionKind, Segment
from workflows.errors import InvalidConfig

if TYPE_CHECKING:
    from activities.generation.harnesses import Harness
    from activities.generation.transcript import Template

PROBES = ("a", "0 b")
"""Two observations without a common first or last character."""


@dataclass(frozen=True)
class RecordedTurn:
    turn: int
    action: Action
    ending: Ending
    act_s: float


@dataclass(frozen=True)
class Rows:
    """What the database holds of one attempt."""

    episode: Episode
    turns: list[Turn]
    config: RunConfig


class Recorded:
    """One attempt. Reads its segments when it is made; raises StorageError where one can't be read, and InvalidConfig
    where what it said can't."""

    def __init__(self, rows: Rows, store: ObjectStore, models_dir: Path) -> None:
        self.episode = rows.episode
        self.limits = rows.config.limits()
        self.taskset, _, self.task_id = rows.episode.task.rpartition("/")
        self._model = rows.config.model
        self._models_dir = models_dir
        segments = [(row, _segment(store, row.segment)) for row in rows.turns if row.segment is not None]
        self._segments = [segment for _, segment in segments]
        read = parse_action if self.limits.harness == SHELL_HARNESS else self._harness(self._template()).read
        self.turns = [_turn(row, segment, read) for row, segment in segments]

    @property
    def commands(self) -> list[RecordedTurn]:
        return [turn for turn in self.turns if turn.action.kind is ActionKind.COMMAND]

    @property
    def answer(self) -> str:
        """The final answer; empty where the attempt gave none."""
        last = self.turns[-1].action if self.turns else None
        return last.answer if last is not None and last.kind is ActionKind.FINAL else ""

    def observation(self, turn: int) -> str | None:
        """What the agent saw of the command of `turn`; None where no later turn shows it, or its model is gone."""
        shown = next(((a, b) for a, b in pairwise(self._segments) if a.turn == turn), None)
        if shown is None:
            return None
        try:
            template = self._template()
            return observed(template, *shown, self._harness(template))
        except InvalidConfig:
            return None

    def _template(self) -> Template:
        """Brings transformers along, which only a difference is worth, and what no shell agent said. Raises
        InvalidConfig."""
        from activities.generation.transcript import Template

        return Template.load(str(model_folder(self._model, self._models_dir)))

    def _harness(self, template: Template) -> Harness:
        from activities.generation.harnesses import open_harness

        return open_harness(self.limits.harness, template)


def read_rows(opened: Session, episode: str) -> Rows:
    """The rows of an attempt, or of an episode's last one. Raises NotFound, InvalidConfig."""
    row, _, _ = queries.episode_fate(opened, episode=episode)
    run = queries.run_row(opened, run=row.run)
    try:
        config = RunConfig.model_validate(run.config)
    except ValueError as error:
        raise InvalidConfig(f"the configuration of run {run.id} can't be read: {error}") from error
    if config.rollout.harness == EXTERNAL_HARNESS:
        raise InvalidConfig(
            f"{row.id} was played by a program of its own (rollout.harness external): what it did between its calls"
            " can't be run again"
        )
    return Rows(row, queries.turns_of(opened, attempt=row.id), config)


def observed(template: Template, answer: Segment, following: Segment, harness: Harness | None = None) -> str:
    """The observation between two turns: the prompt tokens of `following` as text, without the template's own part."""
    last = answer.token_ids[-1]

    def rendered(probe: str) -> str:
        seen = harness.observe(answer.text, probe) if harness else [observation_message(probe)]
        return template.text(template.continuation(last, seen, harness.tools if harness else ()))

    probes = [rendered(probe) for probe in PROBES]
    before, after = _common(*probes), _common(*(probe[::-1] for probe in probes))
    text = template.text(following.token_ids[: following.loss_mask.index(1)])
    return text[before : len(text) - after]


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _segment(store: ObjectStore, key: str) -> Segment:
    return Segment.model_validate_json(store.get(key))


def _turn(row: Turn, segment: Segment, read: Callable[[str], Action]) -> RecordedTurn:
    ending = Ending(exit_code=row.exit_code, timed_out=row.timed_out, digest=row.output_digest)
    return RecordedTurn(turn=row.turn, action=carried(read(segment.text)), ending=ending, act_s=row.act_s)
