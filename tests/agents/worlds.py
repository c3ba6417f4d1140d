"""Agent programs against a scripted engine: real HTTP, real processes, a sandbox that says what a script says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from activities.agents.activities import AgentActivities
from activities.agents.endpoint import AgentEndpoint
from activities.agents.session import AgentSession
from activities.generation.activities import GenerationActivities
from activities.generation.transcript import Template
from storage.objects import ObjectStore
from tasksets.base import Task
from tests.generation.fakes import FakeEngine, choice
from tests.generation.policies import CALL_TAGS, make_tokenizer
from tests.generation.test_routing import pool_of
from workflows.contracts import (
    ActInput,
    ActOutput,
    AgentProgram,
    RolloutLimits,
    RunAgentInput,
    SandboxLease,
    Segment,
    Split,
    TaskRef,
    TurnRecord,
)

LEASE = SandboxLease(sandbox_id="s", container_id="c", image_id="i", host="here", attempt_id="r/g1/e0/a0")
TASK = Task(id="t", kind="k", instruction="Count the cats.", setup="", check="")


class OneTask:
    name = "one"

    def ids(self, split: Split) -> list[str]:
        return ["t"]

    def load(self, task_id: str) -> Task:
        return TASK


@dataclass
class Sandbox:
    """Remembers results by key, as a journal does."""

    says: Callable[[str], ActOutput] = lambda command: ActOutput(exit_code=0, output="3\n", command_s=0.01)
    ran: list[ActInput] = field(default_factory=list)
    fails: list[Exception] = field(default_factory=list)
    """What its next calls raise."""
    kept: dict[str, ActOutput] = field(default_factory=dict)

    async def act(self, message: ActInput) -> ActOutput:
        if self.fails:
            raise self.fails.pop(0)
        if message.op_id not in self.kept:
            self.ran.append(message)
            command = message.command
            told = command.removeprefix("echo ") if message.op_id == "agent" else ""
            self.kept[message.op_id] = ActOutput(exit_code=0, output=told) if told else self.says(command)
        return self.kept[message.op_id]

    @property
    def commands(self) -> list[str]:
        return [message.command for message in self.ran if message.op_id != "agent"]


class AgentWorld:
    """One model and its engine, which says `says` in turn, again from the start after the last."""

    def __init__(self, store: ObjectStore, folder: Path, chat: str, *, special: Sequence[str] = ()) -> None:
        self.store, self.model, self.spool = store, folder / "model", folder / "spool"
        eos = "<|eot_id|>" if special else "<|im_end|>"
        self.tokenizer = make_tokenizer(chat, eos=eos, special=special, added=CALL_TAGS)
        self.tokenizer.save_pretrained(self.model)
        self.template = Template.load(str(self.model))
        self.engine = FakeEngine()
        self.engine.label = "r:3"
        self.says: list[str] = ["Answer: 3"]
        self.made: list[list[int]] = []
        """The ids of each answer, as the engine made them."""
        self.engine.answer = self._answer
        self.sandbox = Sandbox()
        self.generation = GenerationActivities(pool_of(self.engine), store, lambda _: OneTask())
        self.limits: dict[str, Any] = {
            "temperature": 1.0,
            "max_turns": 8,
            "max_tokens_per_turn": 400,
            "max_tokens": 4000,
            "context_length": 8000,
            "step_timeout_s": 5,
            "time_budget_s": 20,
            "max_output_chars": 500,
            "malformed_reminders": 1,
            "harness": "external",
        }

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def rendered(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        """The whole conversation at once, as the template renders it."""
        ids = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return [int(token) for token in ids]

    def message(self, command: str = "true", **changes: Any) -> RunAgentInput:
        program = {name: changes.pop(name) for name in ("env", "grace_s", "own_time_s") if name in changes}
        limits = self.limits | {"agent": AgentProgram(command=command, **program)} | changes
        return RunAgentInput(
            run="r",
            attempt_id="r/g1/e0/a0",
            model=str(self.model),
            task=TaskRef(taskset="one", split=Split.TRAIN, task_id="t"),
            limits=RolloutLimits(**limits),
            lease=LEASE,
            seed=7,
        )

    def session(self, **changes: Any) -> AgentSession:
        return AgentSession(self.message(**changes), self.template, self.generation, self.sandbox.act)

    def activities(self, endpoint: AgentEndpoint) -> AgentActivities:
        return AgentActivities(
            self.generation,
            self.sandbox.act,
            self.store,
            lambda _: OneTask(),
            endpoint,
            spool=self.spool,
            path=f"{Path(sys.executable).parent}:/usr/bin:/bin",
        )

    def segments(self, turns: Sequence[TurnRecord]) -> list[Segment]:
        return [Segment.model_validate_json(self.store.get(str(turn.segment))) for turn in turns]

    def branches(self, turns: Sequence[TurnRecord]) -> list[list[int]]:
        """What trains: the ids of each branch, in its order. Each turn is what the engine saw and made at that turn."""
        seen = [request["token_ids"] for request in self.engine.requests]
        found: dict[int, list[int]] = {}
        for segment in self.segments(turns):
            ids = found.setdefault(segment.branch, [])
            ids += segment.token_ids
            assert ids == seen[segment.turn] + self.made[segment.turn]
            sampled = [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
            assert sampled == self.made[segment.turn], "what was sampled is what is trained"
        return [found[branch] for branch in sorted(found)]

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self.says[len(self.made) % len(self.says)]
        most = body["sampling_params"]["max_tokens"]
        ids = [*self.encode(text), self.template.end_of_turn]
        self.made.append(ids[:most])
        finish = "stop" if len(ids) <= most else "length"
        return choice(ids[:most], (self.engine.label, 0, len(ids[:most])), finish=finish)
