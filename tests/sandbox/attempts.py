"""Attempts that were played for real and recorded as the workflow records them: rows, segments, digests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from temporalio.testing import ActivityEnvironment

from activities.generation.harness import initial_messages, observation_message
from activities.generation.transcript import Template
from activities.replay.recorded import Recorded, read_rows
from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from storage import queries
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Run
from tasksets import open_taskset
from tests.generation.policies import CHATML, make_tokenizer
from workflows.contracts import (
    AcquireInput,
    ActInput,
    ActOutput,
    EpisodeKind,
    EpisodeRecord,
    FinishReason,
    Outcome,
    ReleaseInput,
    SandboxLease,
    Segment,
    Split,
    StopReason,
    TaskRef,
    TurnRecord,
    VerifyInput,
)
from workflows.errors import VerifierBrokenByAnswer

TASK = {
    "kind": "write",
    "instruction": "Write the word of /data/word to the file out, and say done.",
    "setup": "printf 'plum\\n' > /data/word",
    "check": '[ -e /work/broken ] && exit 7; [ "$(cat /work/out)" = plum ] && [ "$ANSWER" = done ]',
    "oracle": ["cat /data/word > out"],
    "oracle_answer": "done",
}
STEP_TIMEOUT_S = 1.0
CHARS = 2000


class Recorder:
    """Plays attempts of run `r` in real sandboxes and writes what the workflow would write."""

    def __init__(self, backend: DockerBackend, database: Engine, store: ObjectStore, folder: Path) -> None:
        self.database, self.store = database, store
        self.models = folder / "models"
        make_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(self.models / "tiny")
        self.taskset = folder / "tasks"
        self.taskset.mkdir()
        (self.taskset / "write.json").write_text(json.dumps(TASK))
        self._backend = backend
        self.activities = SandboxActivities(backend, open_taskset, "here")
        self._template = Template.load(str(self.models / "tiny"))
        self._attempts = 0
        rollout = {"step_timeout_s": STEP_TIMEOUT_S, "max_output_chars": CHARS}
        config = {"model": "tiny", "taskset": str(self.taskset), "rollout": rollout}
        with session(database) as opened:
            opened.add(Run(id="r", state="finished", config=config, mode="async", seed=0, started_at=1.0))

    @property
    def task(self) -> TaskRef:
        return TaskRef(taskset=str(self.taskset.resolve()), split=Split.TRAIN, task_id="write")

    async def play(self, *commands: str, answer: str = "done", **changes: Any) -> str:
        """The id of an attempt that ran these commands and was graded; `changes` go over its record."""
        attempt = f"r/g0/e{self._attempts}/a0"
        self._attempts += 1
        acquired = await _call(
            self.activities.acquire,
            AcquireInput(run="r", group_id="r/g0", attempt_id=attempt, task=self.task),
        )
        try:
            outs = [await self._act(acquired.lease, turn, command) for turn, command in enumerate(commands)]
            verdict = await self._verify(acquired.lease, answer, broken=bool(outs and outs[-1].sandbox_broken))
        finally:
            await _call(self.activities.release, ReleaseInput(attempt_id=attempt))
            # The next test's attempts have the same ids.
            await self._backend.settled()
        record = EpisodeRecord(
            attempt_id=attempt,
            episode_id=attempt.rpartition("/")[0],
            group_id="r/g0",
            run="r",
            kind=EpisodeKind.TRAIN,
            task=self.task,
            attempt=0,
            outcome=Outcome.MODEL_SUCCESS if verdict[1] else Outcome.MODEL_FAILURE,
            stop_reason=verdict[0],
            reward=verdict[1],
            image_id=acquired.lease.image_id,
            turns=self._turns(attempt, commands, outs, answer),
        )
        self.put(record.model_copy(update=changes))
        return attempt

    def put(self, record: EpisodeRecord) -> None:
        with session(self.database) as opened:
            queries.put_episode(opened, record=record)

    def recorded(self, attempt: str) -> Recorded:
        with session(self.database) as opened:
            rows = read_rows(opened, attempt)
        return Recorded(rows, self.store, self.models)

    def change(self, attempt: str, **columns: Any) -> None:
        """Overwrite columns of the attempt's row."""
        with session(self.database) as opened:
            row, _, _ = queries.episode_fate(opened, episode=attempt)
            row.sqlmodel_update(columns)
            opened.add(row)

    def change_turn(self, attempt: str, turn: int, **columns: Any) -> None:
        with session(self.database) as opened:
            row = queries.turns_of(opened, attempt=attempt)[turn]
            row.sqlmodel_update(columns)
            opened.add(row)

    async def _act(self, lease: SandboxLease, turn: int, command: str) -> ActOutput:
        message = ActInput(
            lease=lease,
            op_id=f"t{turn}",
            turn=turn,
            command=command,
            step_timeout_s=STEP_TIMEOUT_S,
            max_output_chars=CHARS,
        )
        out: ActOutput = await _call(self.activities.act, message)
        return out

    async def _verify(self, lease: SandboxLease, answer: str, *, broken: bool) -> tuple[StopReason, float]:
        if broken:
            return StopReason.SANDBOX_KILLED_BY_AGENT, 0.0
        try:
            out = await _call(self.activities.verify, VerifyInput(lease=lease, task=self.task, answer=answer))
        except VerifierBrokenByAnswer:
            return StopReason.VERIFIER_BROKEN_BY_ANSWER, 0.0
        return StopReason.FINISHED, out.reward

    def _turns(self, attempt: str, commands: Sequence[str], outs: list[ActOutput], answer: str) -> list[TurnRecord]:
        texts = [f"Let me see.\n```bash\n{command}\n```" for command in commands]
        turns, last = [], -1
        for turn, text in enumerate([*texts, f"Answer: {answer}"] if answer else texts):
            if turn:
                added = self._template.continuation(last, observation_message(outs[turn - 1].observation()))
            else:
                added = self._template.initial(initial_messages(open_taskset(self.task.taskset).load("write")))
            sampled = [*_encode(text), self._template.end_of_turn]
            last = sampled[-1]
            key = f"runs/r/trajectories/{attempt}/t{turn}-1.json"
            self.store.put(key, _segment(turn, added, sampled, text).model_dump_json().encode())
            turns.append(_record(turn, key, text, outs[turn] if turn < len(outs) else None))
        return turns


def _encode(text: str) -> list[int]:
    ids: list[int] = make_tokenizer(CHATML, eos="<|im_end|>").encode(text, add_special_tokens=False)
    return ids


def _segment(turn: int, added: list[int], sampled: list[int], text: str) -> Segment:
    return Segment(
        turn=turn,
        token_ids=added + sampled,
        loss_mask=[0] * len(added) + [1] * len(sampled),
        logprobs=[0.0] * (len(added) + len(sampled)),
        versions=[-1] * len(added) + [0] * len(sampled),
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        text=text,
        engine="here-e0",
    )


def _record(turn: int, key: str, text: str, out: ActOutput | None) -> TurnRecord:
    record = TurnRecord(turn=turn, segment=key, action=text[:20])
    if out is None:
        return record
    fields = {name: getattr(out, name) for name in ("exit_code", "timed_out", "output_digest")}
    return record.model_copy(update={**fields, "act_s": out.timing.run_s})


async def _call(method: Any, message: object) -> Any:
    return await ActivityEnvironment().run(method, message)
