"""A synchronous collector as people write it: plain asyncio, a batch in start order, nothing shared, nothing warm.

Each episode starts a cold container, runs the task's setup in it, asks the engines in turn (round robin, per request),
runs each command by `docker exec`, checks with the product's own verifier rules and removes the container before it
gives its place to the next. The batch is complete when every group that began is. Engine client, chat template, action
syntax, limits, seeds, sampling and image are the product's; what it does not have is Temporal, an object store, a
database, a pool, a router, or a sandbox before it is asked for. Called by collection.py.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiodocker

from activities.generation.engine import EngineClient
from activities.generation.harness import initial_messages, observation_message, parse_action
from activities.generation.transcript import Template
from activities.sandbox.channel import Operation, Result
from activities.sandbox.container import Mounts, SandboxSpec, create_config
from activities.sandbox.toolbox import build_toolbox
from activities.sandbox.verification import judge, set_up
from tasksets.base import Task, Taskset
from workflows.contracts import Action, ActionKind, FinishReason, RolloutLimits, TaskRef, derive_seed

LABEL = "ratchet.bench"


@dataclass
class Turn:
    """What the engine's own usage says of one generation. Tokens of the earlier turns are `prefix` of it."""

    prompt: int
    prefix: int
    cached: int
    sampled: int


@dataclass
class Played:
    """One finished episode. `ended_s`: seconds after the batch's start."""

    group: int
    reward: float
    ended_s: float
    turns: list[Turn] = field(default_factory=list)


@dataclass
class Collected:
    """A batch of the baseline. `closed_s`: seconds after the batch's start at which each group closed, by number."""

    seconds: float
    closed_s: dict[int, float]
    episodes: list[Played]


class SynchronousCollector:
    """`template` is the policy's; `state` holds the tools that a sandbox's own commands need."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        docker: aiodocker.Docker,
        template: Template,
        taskset: Taskset,
        limits: RolloutLimits,
        *,
        state: Path,
        most: int,
    ) -> None:
        self._engines = itertools.cycle(engines)
        self._docker = docker
        self._template = template
        self._taskset = taskset
        self._limits = limits
        self._state = state
        self._tools = build_toolbox(state / "toolbox")
        self._places = asyncio.Semaphore(most)

    async def batch(self, tasks: Sequence[TaskRef], *, first: int, group_size: int, seed: int) -> Collected:
        """All groups of the batch, from `first` on, to their ends."""
        began = time.monotonic()
        closed: dict[int, float] = {}
        played: list[Played] = []

        async def group(number: int, task: Task) -> None:
            group_seed = derive_seed(seed, "group", number)
            seeds = [derive_seed(group_seed, "sibling", index) for index in range(group_size)]
            played.extend(await asyncio.gather(*(self._episode(number, task, each, began) for each in seeds)))
            closed[number] = time.monotonic() - began

        loaded = [self._taskset.load(ref.task_id) for ref in tasks]
        await asyncio.gather(*(group(first + index, task) for index, task in enumerate(loaded)))
        return Collected(time.monotonic() - began, closed, played)

    async def _episode(self, group: int, task: Task, seed: int, began: float) -> Played:
        async with self._places:
            async with self._sandbox(task) as run:
                await set_up(task, run)
                answer, turns = await self._play(task, run, seed)
                verdict = await judge(task, answer, run, partial(self._sandbox, task))
            return Played(group, 1.0 if verdict.passed else 0.0, time.monotonic() - began, turns)

    async def _play(self, task: Task, run: Exec, seed: int) -> tuple[str, list[Turn]]:
        """The agent's final answer, empty where it gave none, and its turns. The endings are those of Episode."""
        limits, template = self._limits, self._template
        ids = template.initial(initial_messages(task))
        turns: list[Turn] = []
        reminders, spent_s, sampled = 0, 0.0, 0
        for turn in range(limits.max_turns):
            left = min(limits.max_tokens_per_turn, limits.max_tokens - sampled, limits.context_length - len(ids))
            if left <= 0:
                break
            made = await next(self._engines).generate(
                ids,
                temperature=limits.temperature,
                max_tokens=left,
                seed=derive_seed(seed, turn),
                stop_token_ids=[template.end_of_turn],
            )
            prefix = turns[-1].prompt + turns[-1].sampled if turns else 0
            turns.append(Turn(len(ids), prefix, made.cached_tokens, len(made.token_ids)))
            sampled += len(made.token_ids)
            ids = ids + made.token_ids
            action = parse_action(template.text(made.token_ids))
            if action.kind is ActionKind.FINAL:
                return action.answer, turns
            if action.kind is ActionKind.MALFORMED:
                if made.finish_reason is FinishReason.LENGTH or reminders == limits.malformed_reminders:
                    break
                reminders += 1
                observation = action.error
            else:
                observation, seconds = await self._act(run, turn, action)
                spent_s += seconds
                if spent_s >= limits.time_budget_s:
                    break
            ids = ids + template.continuation(made.token_ids[-1], observation_message(observation))
        return "", turns

    async def _act(self, run: Exec, turn: int, action: Action) -> tuple[str, float]:
        result = await run(Operation(op_id=f"t{turn}", command=action.command, timeout_s=self._limits.step_timeout_s))
        body = (result.head + result.tail).decode(errors="replace")[: self._limits.max_output_chars].rstrip("\n")
        ending = f"(timed out after {result.seconds:.0f} s)" if result.timed_out else ""
        if not ending and result.exit_code:
            ending = f"(exit {result.exit_code})"
        return "\n".join(part for part in (body, ending) if part) or "(no output)", result.seconds

    @asynccontextmanager
    async def _sandbox(self, task: Task) -> AsyncIterator[Exec]:
        """A cold container of the product's own flags, removed at the end."""
        box = self._state / "boxes" / uuid.uuid4().hex
        box.mkdir(parents=True)
        config = create_config(
            SandboxSpec(image=task.image),
            image_id=task.image,
            mounts=Mounts(self._tools, box),
            labels={LABEL: str(self._state)},
            sbxd=False,
            cgroup_parent="",
        )
        container = await self._docker.containers.create(config)
        try:
            await container.start()
            yield Exec(container)
        finally:
            await container.delete(force=True)


class Exec:
    """Runs an operation by one `docker exec`, with its time-out enforced inside."""

    def __init__(self, container: aiodocker.containers.DockerContainer) -> None:
        self._container = container

    async def __call__(self, op: Operation) -> Result:
        limit = max(1, round(op.timeout_s))
        words = ["/run/ratchet/tools/bin/busybox", "timeout", "-s", "KILL", str(limit), op.shell, "-c", op.text]
        began = time.monotonic()
        made = await self._container.exec(
            words, user=str(op.uid), workdir=op.cwd, environment=op.environment, stdout=True, stderr=True
        )
        output = bytearray()
        async with made.start(detach=False) as stream:
            while (message := await stream.read_out()) is not None:
                output += message.data
        seconds = time.monotonic() - began
        code = int((await made.inspect())["ExitCode"])
        timed_out = code == 137 and seconds >= limit
        return Result(
            exit_code=None if timed_out else code,
            signal=None,
            timed_out=timed_out,
            spawn_errno=0,
            seconds=seconds,
            total_bytes=len(output),
            head=bytes(output[: op.cap_bytes]),
            tail=b"",
        )


async def leftovers(docker: aiodocker.Docker, state: Path) -> list[aiodocker.containers.DockerContainer]:
    """Containers of the collectors with this `state`: those of one that was ended half way stay."""
    found: list[aiodocker.containers.DockerContainer] = await docker.containers.list(
        all=True, filters={"label": [f"{LABEL}={state}"]}
    )
    return found
