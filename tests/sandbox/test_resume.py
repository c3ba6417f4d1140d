"""An episode goes on at its turn however often its worker is killed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from activities.sandbox.docker import DockerBackend
from storage.objects import ObjectStore
from tests.generation.policies import CHATML, make_tokenizer
from tests.sandbox import rollout
from tests.workflows.conftest import temporal, unique
from tests.workflows.test_episode import limits
from workflows.contracts import (
    EpisodeInput,
    EpisodeKind,
    EpisodeRecord,
    EpisodeSummary,
    Outcome,
    Segment,
    Split,
    TaskRef,
)

__all__ = ["temporal"]

pytestmark = pytest.mark.docker

TURNS = 6
SECONDS = 0.6
"""What each answer and each command takes: long enough to be killed within."""
PATIENCE_S = 180
COMMANDS = [f"echo line {turn} >> log; sleep {SECONDS}; wc -l < log" for turn in range(TURNS)]
WHOLE = "\\n".join(f"line {turn}" for turn in range(TURNS))
TASK = {
    "kind": "append",
    "instruction": "Append lines.",
    "setup": "true",
    "check": f'[ "$(cat /work/log)" = "$(printf "{WHOLE}")" ] || exit 1',
}


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.sandbox.rollout", "boto3.s3.transfer"])
"""Workers are forked from a process that has imported all they need, so that a start takes no seconds."""


class Rollout:
    """One worker at a time, in a process of its own."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self._log = folder / "log"
        self._log.touch()
        self._process: Any = None

    def start(self) -> None:
        self._process = CONTEXT.Process(target=rollout.serve, args=(self.settings,), daemon=True)
        self._process.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def begun(self) -> list[str]:
        return self._log.read_text().split()

    async def begins(self, name: str) -> None:
        """Return when the next activity of that name has begun."""
        before, until = self.begun().count(name), time.monotonic() + PATIENCE_S
        while self.begun().count(name) == before:
            assert time.monotonic() < until, f"no {name} begins: {self.begun()}"
            assert self._process.is_alive(), "the worker ended by itself"
            await asyncio.sleep(0.01)


@pytest.fixture
async def worker(
    temporal: Client,
    backend: DockerBackend,
    docker_host: str,
    object_store: ObjectStore,
    s3_endpoint: tuple[str, str, str],
    tmp_path: Path,
) -> AsyncIterator[Rollout]:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "append.json").write_text(json.dumps(TASK))
    make_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(tmp_path / "model")
    endpoint, access, secret = s3_endpoint
    store = {
        "endpoint": endpoint,
        "bucket": object_store.bucket,
        "region": "us-east-1",
        "access_key": access,
        "secret_key": secret,
    }
    made = Rollout(
        tmp_path,
        {
            "run": "resume",
            "folder": str(tmp_path),
            "state": str(backend.state),
            "docker_host": docker_host,
            "temporal": temporal.service_client.config.target_host,
            "queue": unique("queue"),
            "store": store,
            "answers": [*(f"```bash\n{command}\n```" for command in COMMANDS), "Answer: done"],
            "delay_s": SECONDS,
        },
    )
    yield made
    made.kill()
    await backend.sweep("resume")


async def play(client: Client, worker: Rollout, kills: list[str], seed: int) -> tuple[EpisodeSummary, EpisodeRecord]:
    """One episode whose worker is killed at a random moment of the next activity of each of these names."""
    chance = random.Random(seed)
    message = EpisodeInput(
        run="resume",
        group_id=unique("resume/g"),
        index=0,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model=str(worker.folder / "model"),
        task=TaskRef(taskset=str(worker.folder / "tasks"), split=Split.TRAIN, task_id="append"),
        limits=limits(
            max_turns=TURNS + 1, max_tokens=4000, max_tokens_per_turn=400, context_length=8000, time_budget_s=60
        ),
        seed=seed,
    )
    handle = await client.start_workflow(
        "Episode",
        message,
        id=message.attempt_id,
        task_queue=worker.settings["queue"],
        result_type=EpisodeSummary,
    )
    for name in kills:
        worker.start()
        await worker.begins(name)
        await asyncio.sleep(chance.uniform(0, SECONDS))
        worker.kill()
    worker.start()
    summary = await asyncio.wait_for(handle.result(), PATIENCE_S)
    return summary, EpisodeRecord.model_validate_json((worker.folder / "record").read_text())


async def test_a_worker_killed_at_random_costs_no_turn_no_command_runs_twice_and_no_token_comes_twice(
    temporal: Client, worker: Rollout, object_store: ObjectStore
) -> None:
    kills = ["act", "generate", "act", "act", "generate", "act"]
    summary, record = await play(temporal, worker, kills, seed=1)
    begun = worker.begun()
    assert begun.count("ready") == len(kills) + 1
    assert begun.count("act") > TURNS and begun.count("generate") > TURNS + 1, "no kill hit anything"
    assert (summary.outcome, summary.reward) == (Outcome.MODEL_SUCCESS, 1.0), "the file has one line per turn, in order"
    assert [turn.turn for turn in record.turns] == list(range(TURNS + 1))
    assert [turn.exit_code for turn in record.turns] == [*[0] * TURNS, None]
    stored = {key for key, _ in object_store.keys("runs/resume/trajectories/")}
    assert set(record.segments) <= stored and len(stored) < begun.count("generate"), "a partial answer was stored"
    check_tokens(record, [Segment.model_validate_json(object_store.get(key)) for key in record.segments], worker)


def check_tokens(record: EpisodeRecord, segments: list[Segment], worker: Rollout) -> None:
    """Every answer is there once, whole, in its turn."""
    assert [segment.turn for segment in segments] == list(range(TURNS + 1))
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    sampled = [
        [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
        for segment in segments
    ]
    assert [tokenizer.decode(ids) for ids in sampled] == [f"{text}<|im_end|>" for text in worker.settings["answers"]]
    whole = [token for segment in segments for token in segment.token_ids]
    assert (len(whole), sum(map(len, sampled))) == (record.sequence_tokens, record.sampled_tokens)
    assert tokenizer.decode(whole).count("<|im_start|>assistant") == TURNS + 1
