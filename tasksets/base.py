"""What a task is, and how a taskset hands tasks out.

Owns the task record, one for all formats, and the `Taskset` seam. A native task lives in a small sandbox that Ratchet
makes: `setup` prepares it, `check` grades it. A task of a public format brings a machine of its own: `machine` says how
its image is made and how it is graded. Called by the sandbox activities (setup, check), the generation activities
(instruction) and the control activities (order).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from workflows.contracts import Split


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


ORACLE_S = 900.0
"""For the oracle of a task that grants its agent no bound."""
LONGEST_S = 7 * 86400.0
"""What a phase may take."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]


class ImageSource(_Record):
    """Where an image comes from: `reference` is pulled; `context` is built, and stands in where a pull fails."""

    context: str = ""
    """Folder that is sent to the builder, absolute; empty: there is nothing to build."""
    dockerfile: str = "Dockerfile"
    """Below `context`."""
    args: dict[str, str] = {}
    reference: str = ""
    """Example: `ghcr.io/org/name:tag`."""
    timeout_s: Seconds = 600.0


class Artifact(_Record):
    """A path that is carried from the agent's machine to the same place, or another, in the one that grades."""

    source: str
    destination: str = ""
    """Empty: `source`."""


class Reads(StrEnum):
    """Where the verifier says what an answer is worth."""

    REWARD_FILE = "reward_file"
    """`reward.json` or `reward.txt` in the folder of its logs."""
    PYTEST_SUMMARY = "pytest_summary"
    """The lines after `short test summary info` of its output: all must be well."""


class Grading(_Record):
    """How the answer in a machine is graded: in another one, that starts for it."""

    tests: list[str]
    """Files and folders of this host, absolute: the files and what is in the folders is there in /tests, read-only."""
    command: str
    timeout_s: Seconds
    reads: Reads
    rewards: list[float] = []
    """Those that its script can write; empty: any."""
    logs: str
    """Where the verifier writes."""
    user: str = ""
    """Empty: the image's."""
    env: dict[str, str] = {}
    image: ImageSource | None = None
    """None: the machine's own. Another one gets the artifacts and nothing else, and has its tests built in."""
    artifacts: list[Artifact] | None = None
    """What is carried over; None: everything that the agent changed, but what the verifier has to trust."""
    may_change: list[str] = []
    """Trusted files and folders that an honest answer changes, absolute."""


class Healthcheck(_Record):
    command: str
    interval_s: Pause = 5.0
    timeout_s: Seconds = 30.0
    start_s: Pause = 0.0
    retries: int = Field(3, ge=0)


class Machine(_Record):
    """A whole machine as a public format asks for it: its image, who works in it, and how it is graded."""

    format: str
    """`harbor` or `terminal-bench`."""
    image: ImageSource
    grading: Grading
    user: str = ""
    """Who the agent is; empty: the image's user."""
    workdir: str = ""
    """Where its commands begin; empty: the image's."""
    env: dict[str, str] = {}
    start: list[str] = []
    """A program that runs beside the agent; empty: what the image's entrypoint starts, if anything."""
    healthcheck: Healthcheck | None = None
    folders: list[str] = []
    """Made, and writable for everybody, before the agent."""
    oracle_folder: str = ""
    """Where the oracle's commands put its files."""
    cpus: float = Field(1.0, gt=0, allow_inf_nan=False)
    memory_mb: int = Field(2048, ge=6)
    storage_mb: int = Field(10240, ge=1)
    agent_timeout_s: Seconds | None = None
    """What the format grants the agent; None: no bound."""

    @property
    def grading_s(self) -> float:
        """The longest that a judgement takes: the verifier on the answer, again, and on the oracle's after it."""
        return 3 * self.grading.timeout_s + (self.agent_timeout_s or ORACLE_S)


class ServiceImage(_Record):
    """What a service of a public format's compose file is made from."""

    source: ImageSource
    entrypoint: list[str] | None = None
    """None: the image's, and its command as well where there is no other; else that one is not used."""
    command: list[str] | None = None
    """None: as said of `entrypoint`."""
    user: str = ""
    """Empty: the image's."""
    workdir: str = ""
    """Empty: the image's."""
    storage_mb: int = Field(10240, ge=1)


class Service(_Record):
    """A program beside the sandbox: in a container of its own, in the sandbox's network, where its name is its address.

    A native one lives in a small sandbox such as the agent's: `setup` prepares it, uid 1000 runs `start` in /work."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    aliases: list[str] = []
    """Other names under which it can be reached."""
    setup: str = ""
    """Shell script run as root before its program; what it leaves is kept and forked, as a task's."""
    start: str = ""
    """Shell command that runs until it is killed."""
    healthcheck: Healthcheck | None = None
    """It must succeed before the agent begins, and again before the verdict. None, for those with an image of their
    own: something of it has to run."""
    state: str = ""
    """Shell script run as root in it, with trusted tools, once the agent's processes are gone: its output is what the
    task's check has as STATE_<NAME>, at most 64 KiB of it. Exit code must be 0."""
    env: dict[str, str] = {}
    """For all of these."""
    memory_mb: int = Field(256, ge=6)
    cpus: float = Field(1.0, gt=0, allow_inf_nan=False)
    processes: int = Field(128, ge=8)
    image: ServiceImage | None = None
    """None: a native one, on the base image of its task."""

    @property
    def variable(self) -> str:
        """Example: `STATE_WEB_SHOP` of the service `web-shop`."""
        return "STATE_" + "".join(letter if letter.isalnum() else "_" for letter in self.name).upper()


class Task(_Record):
    """One problem: an environment, an instruction and a verifier."""

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
    """Ids of the tests that the verifier must report. A missing one is tampering. Of a native task each is on a line
    `PASSED id` or `FAILED id` of `check`; of a machine's they are pytest's, `test_outputs.py::test_all`, without
    parameters."""
    image: str = "busybox"
    """Name of a base image that Ratchet builds; of a native task."""
    machine: Machine | None = None
    """None: a native task."""
    services: list[Service] = []
    """Programs beside the sandbox, in the order in which they start."""
    notes: list[str] = []
    """What its format asked for and does not get, in words."""


class Taskset(Protocol):
    """Tasks by id, the same for the same name on every machine and in every process."""

    name: str

    def ids(self, split: Split) -> list[str]:
        """All task ids of a split, in a fixed order."""
        ...

    def load(self, task_id: str) -> Task:
        """The task. Raises InvalidConfig for an id that the taskset doesn't have."""
        ...
