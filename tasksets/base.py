"""What a task is, and how a taskset hands tasks out.

Owns the native task record and the `Taskset` seam; readers of other formats turn theirs into the same record. Called by
the sandbox activities (setup, check), the generation activities (instruction) and the control activities (order).
"""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel, ConfigDict

from workflows.contracts import Split


class Task(BaseModel):
    """One problem: an environment, an instruction and a verifier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    kind: str
    """Family of the task, e.g. `count`; evaluation is reported per kind."""
    instruction: str
    """What the agent is told."""
    setup: str
    """Shell script run as root in the fresh sandbox before the agent; exit code must be 0."""
    check: str
    """Shell script of the verifier, run after the agent with ANSWER in its environment and a trusted PATH.
    Exit 0: reward 1; exit 1: reward 0; anything else: the verifier broke."""
    oracle: list[str] = []
    """Commands that solve the task, one per turn."""
    oracle_answer: str = ""
    oracle_observations: list[str] = []
    """What the agent sees of each command of `oracle`, where the taskset knows it: the warm start learns from it."""
    protected: list[str] = []
    """Files and folders of the verifier in the agent's reach, absolute. One that is not after the agent what it was
    after the setup (content, owner, mode, name) is tampering."""
    expected_tests: list[str] = []
    """Ids of the tests that `check` must report, each on a line `PASSED id` or `FAILED id`. A missing one is tampering.
    """
    image: str = "busybox"
    """Name of a base image that Ratchet builds."""


class Taskset(Protocol):
    """Tasks by id, the same for the same name on every machine and in every process."""

    name: str

    def ids(self, split: Split) -> list[str]:
        """All task ids of a split, in a fixed order."""
        ...

    def load(self, task_id: str) -> Task:
        """The task. Raises InvalidConfig for an id that the taskset doesn't have."""
        ...
