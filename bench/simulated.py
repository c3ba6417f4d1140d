"""`python -m bench.simulated ROLE --folder F --turns N --seconds S`: a worker with real workflows and simulated work.

The workflows, the converter, the interceptor, the worker's tuning and the lineage activities with their database are
the product's; engines, sandboxes, trainer and publication answer after a given time with messages of the usual size.
ROLE is `control` or `rollout`. Called by scale.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.worker import Worker

from activities.lineage.activities import LineageActivities
from activities.lineage.runs import RunControlActivities
from bench.sampled_group import TELL, SampledGroup
from storage import queries
from storage.database import open_database, session
from tasksets import open_taskset
from workers.parts import methods
from workers.roles import Role, episode_tuning
from workers.settings import Settings
from workers.temporal import connect
from workflows.closing import close_group
from workflows.contracts import (
    AcquireInput,
    AcquireOutput,
    ActInput,
    Action,
    ActionKind,
    ActOutput,
    ApplyInput,
    ApplyOutput,
    EngineInfo,
    EpisodeKind,
    EpisodeRecord,
    EpisodeSummary,
    FinishReason,
    GenerateInput,
    GenerateOutput,
    GroupInput,
    GroupResult,
    Outcome,
    PublishInput,
    PublishOutput,
    Queue,
    ReleaseInput,
    SandboxLease,
    ServeInput,
    ServeOutput,
    StopReason,
    SweepInput,
    SweepOutput,
    TrainerInput,
    TrainerOutput,
    TurnRecord,
    UpdateInput,
    UpdateOutput,
    VerifyInput,
    VerifyOutput,
    engine_queue,
)
from workflows.registry import ON_CONTROL, ON_EPISODES

HOST = "simulated"
OUTPUT = "acorn 17\nbadge 23\ncedar 42\n" * 4


class NoObjects:
    """The object store of a run that has none."""

    def abort_uploads(self, prefix: str) -> None:
        """Nothing was uploaded."""


class SimulatedWork:
    """`turns` per episode; `seconds` that a generation takes, and a twentieth of it a command."""

    def __init__(self, folder: Path, *, turns: int, seconds: float) -> None:
        self._database = open_database(f"sqlite:///{folder / 'ratchet.db'}")
        self._turns = turns
        self._seconds = seconds
        self._version = folder / "version"
        """Holds what the engine serves, for both workers: what an older version made would be too stale to train."""

    @property
    def version(self) -> int:
        return int(self._version.read_text()) if self._version.exists() else 0

    @activity.defn(name="generate")
    async def generate(self, message: GenerateInput) -> GenerateOutput:
        await self._pass(self._seconds)
        last = message.turn == self._turns - 1
        action = (
            Action(kind=ActionKind.FINAL, answer="cedar")
            if last
            else Action(kind=ActionKind.COMMAND, command=f"grep -n cedar /data/file-{message.turn}")
        )
        return GenerateOutput(
            segment=f"runs/{message.run}/trajectories/{message.attempt_id}/t{message.turn}-1.json",
            action=action,
            text=f"```bash\n{action.command}\n```" if action.command else f"Answer: {action.answer}",
            finish_reason=FinishReason.STOP,
            engine=f"{HOST}-e0",
            prompt_tokens=80 + 60 * message.turn,
            sampled_tokens=24,
            cached_tokens=64 * message.turn,
            min_version=self.version,
            max_version=self.version,
        )

    @activity.defn(name="acquire")
    async def acquire(self, message: AcquireInput) -> AcquireOutput:
        await self._pass(self._seconds / 4)
        name = message.attempt_id.replace("/", "-")
        image = f"sha256:{'0' * 64}"
        lease = SandboxLease(
            sandbox_id=name, container_id="c" * 64, image_id=image, host=HOST, attempt_id=message.attempt_id
        )
        return AcquireOutput(lease=lease)

    @activity.defn(name="act")
    async def act(self, message: ActInput) -> ActOutput:
        await self._pass(self._seconds / 20)
        return ActOutput(exit_code=0, output=OUTPUT, total_bytes=len(OUTPUT), command_s=0.01, output_digest="d" * 64)

    @activity.defn(name="verify")
    async def verify(self, message: VerifyInput) -> VerifyOutput:
        await self._pass(self._seconds / 20)
        reward = _reward(message.lease.attempt_id)
        return VerifyOutput(reward=reward, passed=reward > 0, detail="check: exit 0")

    @activity.defn(name="release")
    async def release(self, message: ReleaseInput) -> None:
        await self._pass(self._seconds / 20)

    @activity.defn(name="sweep")
    async def sweep(self, message: SweepInput) -> SweepOutput:
        return SweepOutput()

    @activity.defn(name=TELL)
    async def tell_group(self, group: GroupInput) -> GroupResult:
        """The rows of a whole group that no workflow played."""
        records = [_told(group, index, self._turns, self.version) for index in range(group.group_size)]
        siblings = [
            EpisodeSummary(**{name: getattr(item, name) for name in EpisodeSummary.model_fields}) for item in records
        ]
        counted = {"outcomes": {}, "started_at": time.time(), "closed_at": time.time(), "first_sibling_at": time.time()}
        result = close_group(group, siblings).model_copy(update=counted)

        def write() -> None:
            with session(self._database) as opened:
                for record in records:
                    queries.put_episode(opened, record=record)
                queries.put_group(opened, run=group.run, result=result)

        await asyncio.to_thread(write)
        return result

    @activity.defn(name="start_trainer")
    async def start_trainer(self, message: TrainerInput) -> TrainerOutput:
        return TrainerOutput(checkpoint="c0", parameters=1, world_size=1)

    @activity.defn(name="update")
    async def update(self, message: UpdateInput) -> UpdateOutput:
        return UpdateOutput(step=message.step, checkpoint=f"c{message.step}", metrics={"loss": 0.1})

    @activity.defn(name="publish")
    async def publish(self, message: PublishInput) -> PublishOutput:
        return PublishOutput(version=message.version, manifest=f"m{message.version}", digest="d" * 64, bytes=1)

    @activity.defn(name="serve")
    async def serve(self, message: ServeInput) -> ServeOutput:
        return ServeOutput(engine=message.engine.name, restarted=False, seconds=0)

    @activity.defn(name="apply")
    async def apply(self, message: ApplyInput) -> ApplyOutput:
        self._version.write_text(str(message.version))
        return ApplyOutput(engine=message.engine.name, version=message.version, proven=True, pause_s=0.1)

    @staticmethod
    async def _pass(seconds: float) -> None:
        # Also for no time at all: an activity that waits for nothing would end before its interceptor does its part.
        await asyncio.sleep(max(seconds, 0.001))


def _reward(attempt_id: str) -> float:
    """1 for every other sibling, so that each group has something to teach. Of `<group>/e<k>/a<m>`."""
    return float(int(attempt_id.split("/")[-2][1:]) % 2)


def _told(group: GroupInput, index: int, turns: int, version: int) -> EpisodeRecord:
    episode = f"{group.group_id}/e{index}"
    attempt, reward = f"{episode}/a0", float(index % 2)
    return EpisodeRecord(
        attempt_id=attempt,
        episode_id=episode,
        group_id=group.group_id,
        run=group.run,
        kind=EpisodeKind.TRAIN,
        task=group.task,
        attempt=0,
        outcome=Outcome.MODEL_SUCCESS if reward else Outcome.MODEL_FAILURE,
        stop_reason=StopReason.FINISHED,
        reward=reward,
        why="answered 'cedar'",
        image_id=f"sha256:{'0' * 64}",
        min_version=version,
        max_version=version,
        turns=[
            TurnRecord(turn=turn, segment=f"runs/{attempt}/t{turn}-1.json", engine=f"{HOST}-e0", output_digest="d" * 64)
            for turn in range(turns)
        ],
        started_at=time.time(),
        ended_at=time.time(),
    )


def lineage_activities(folder: Path) -> LineageActivities:
    """The product's own, on the SQLite file of `folder`; its `models/simulated` is what `open_run` looks at."""
    no_objects: Any = NoObjects()
    return LineageActivities(
        open_database(f"sqlite:///{folder / 'ratchet.db'}"),
        no_objects,
        engines=[EngineInfo(name=f"{HOST}-e0", host=HOST, url="http://simulated")],
        models_dir=folder / "models",
        open_taskset=open_taskset,
    )


async def serve(role: str, folder: Path, *, turns: int, seconds: float) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    client = await connect(Settings(), role=role, sandboxed=role != Role.ROLLOUT)
    lineage = lineage_activities(folder)
    served = [*methods(lineage), *methods(RunControlActivities(client))]
    served += methods(SimulatedWork(folder, turns=turns, seconds=seconds))
    if role == "control":
        workers = [
            Worker(client, task_queue=Queue.CONTROL, workflows=ON_CONTROL, activities=served),
            Worker(client, task_queue=Queue.TRAINING, activities=served),
            Worker(client, task_queue=engine_queue(HOST), activities=served),
        ]
    else:
        workflows = [SampledGroup if item.__name__ == "Group" else item for item in ON_EPISODES]
        tuning = episode_tuning(Settings())
        workers = [Worker(client, task_queue=Queue.EPISODES, workflows=workflows, activities=served, **tuning)]
    async with workers[0]:
        rest = [asyncio.create_task(worker.run()) for worker in workers[1:]]
        (folder / f"{role}.ready").touch()
        await stopped.wait()
        await asyncio.gather(*(worker.shutdown() for worker in workers[1:]))
        await asyncio.gather(*rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("control", "rollout"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(serve(options.role, options.folder, turns=options.turns, seconds=options.seconds))
    sys.stdout.flush()
    # The SDK's threads can abort the interpreter at its normal exit.
    os._exit(0)


if __name__ == "__main__":
    main()
