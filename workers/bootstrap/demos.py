"""Transcripts from which the tiny policy learns: clean ones, and ones with the mistakes an agent really makes.

Owns the mistakes. They are decisions (give up, guess, answer before the work, the wrong tool, no action at all), never
wrong copies of a value: reinforcement learning can unlearn a decision. Called by `workers.bootstrap.tiny`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from activities.generation.harness import initial_messages, observation_message, parse_action
from tasksets.base import Task
from tasksets.shell import KINDS, WORDS, draw_task

MAX_TURNS = 4
RECOVERY_RATE = 0.3
"""Chance that a wrong command is noticed."""
MUMBLE = "I am not sure."


@dataclass(frozen=True)
class Detour:
    """A wrong command, what the agent sees of it, and the answer it would give then."""

    command: str
    observation: str
    answer: str


def draw_transcript(rng: random.Random, fault_rate: float) -> list[dict[str, str]]:
    """One conversation about a task of the training split, as messages. `fault_rate`: chance of a mistake per turn."""
    return transcript(draw_task(rng.choice(list(KINDS)), rng), rng, fault_rate)


def transcript(task: Task, rng: random.Random, fault_rate: float) -> list[dict[str, str]]:
    """One conversation about `task`, which must say what the commands of its oracle show."""
    return _Writer(task, rng, fault_rate).write()


class _Writer:
    def __init__(self, task: Task, rng: random.Random, fault_rate: float) -> None:
        self.task = task
        self.rng = rng
        self.fault_rate = fault_rate
        self.messages = initial_messages(task)

    def write(self) -> list[dict[str, str]]:
        done = 0
        for _ in range(MAX_TURNS):
            if done == len(self.task.oracle):
                if self.rng.random() >= self.fault_rate / 2:
                    self._say(f"Answer: {self.task.oracle_answer}")
                    break
                self._say(MUMBLE, parse_action(MUMBLE).error)
            elif self.rng.random() >= self.fault_rate:
                self._say(_block(self.task.oracle[done]), self.task.oracle_observations[done])
                done += 1
            elif self._ends_in_a_mistake(done):
                break
        return self.messages

    def _ends_in_a_mistake(self, done: int) -> bool:
        """Add a mistake after `done` right commands; whether the episode ends with it."""
        mistake = self.rng.choice(("quit", "mumble", "detour", "detour"))
        if mistake == "mumble":
            self._say(MUMBLE, parse_action(MUMBLE).error)
            return False
        if mistake == "quit":
            self._say(f"Answer: {self._early_answer(done)}")
            return True
        detour = _detour(self.task, done, self.rng)
        self._say(_block(detour.command), detour.observation)
        if self.rng.random() < RECOVERY_RATE:
            return False
        self._say(f"Answer: {detour.answer}")
        return True

    def _say(self, reply: str, observation: str | None = None) -> None:
        self.messages.append({"role": "assistant", "content": reply})
        if observation is not None:
            self.messages.append(observation_message(observation))

    def _early_answer(self, done: int) -> str:
        """What an agent says that stops before the work is finished."""
        if self.task.oracle_answer == "done":
            return "done"
        return self.task.oracle_observations[done - 1] if done else "unknown"


def _detour(task: Task, done: int, rng: random.Random) -> Detour:
    """The wrong tool, as it is plausible at this point of the task's kind. The tool's name is the whole mistake."""
    names = _named(task)
    match task.kind:
        case "find" | "count":
            file, number = names[task.kind == "find"], str(rng.randrange(10, 100))
            return Detour(f"wc -l /data/{file}", f"{number} /data/{file}", number)
        case "top":
            word = rng.choice(WORDS)
            return Detour(f"head -n 1 /data/{names[0]}", f"{rng.randrange(10, 100)} {word}", word)
        case "edit":
            return Detour(f"echo {names[1]} > {names[2]}", "(no output)", "done")
        case "move":
            return Detour(f"cp {names[0]} {names[1]}", "(no output)", "done")
        case "report" if done:
            # Not the new file's name again: reading once more leaves the right next step as likely as elsewhere.
            return Detour(task.oracle[0], task.oracle_observations[0], "done")
        case "report":
            return Detour(f"touch {names[1]}", "(no output)", "done")
        case "fix":
            return Detour(f"echo {names[1]}", names[1], "done")
    return Detour("pwd", "/work", task.oracle_observations[done - 1] if done else "unknown")


def _named(task: Task) -> list[str]:
    """The words of the taskset that the instruction names, in its order."""
    plain = "".join(letter if letter.isalpha() else " " for letter in task.instruction)
    return [word for word in plain.split() if word in WORDS]


def _block(command: str) -> str:
    return f"```bash\n{command}\n```"
