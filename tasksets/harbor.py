"""Harbor tasks, read as they are: task.toml, instruction.md, environment/, tests/test.sh, solution/solve.sh.

Owns what of the format Ratchet understands, and the reasons for what it does not. The verifier is `tests/test.sh`; it
says what an answer is worth in `/logs/verifier/reward.json` or `reward.txt`. Keys that Harbor does not know are ignored
here too. Called by `tasksets.folder`.
"""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasksets.base import Artifact, Grading, Healthcheck, ImageSource, Machine, Pause, Reads, Seconds, Task
from tasksets.compose import Composed, compose_file, megabytes, read_compose
from tasksets.oracle import folder_files, oracle_commands
from tasksets.pytests import expected_tests
from tasksets.reading import TESTS, Tuning, Unsupported, faults, interpolate_all, leaving, read_text
from tasksets.rewards import written_rewards

FILE = "task.toml"
LOGS = "/logs/verifier"
ARTIFACTS = "/logs/artifacts"
SOLUTION = "/solution"
SERVICE = "main"
_COMPOSE = dict.fromkeys(
    (
        *("MAIN_IMAGE_NAME", "CPUS", "MEMORY", "CONTEXT_DIR", "PREBUILT_IMAGE_NAME"),
        *("HOST_VERIFIER_LOGS_PATH", "HOST_AGENT_LOGS_PATH", "HOST_ARTIFACTS_PATH"),
    ),
    "",
) | {
    "TEST_DIR": TESTS,
    "ENV_VERIFIER_LOGS_PATH": LOGS,
    "ENV_AGENT_LOGS_PATH": "/logs/agent",
    "ENV_ARTIFACTS_PATH": ARTIFACTS,
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Healthcheck(_Part):
    command: str
    interval_sec: Pause = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Pause = 0.0
    retries: int = Field(3, ge=0)


class _Environment(_Part):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(None, ge=0, allow_inf_nan=False)
    memory_mb: int | None = Field(None, ge=0)
    memory: str | None = None
    storage_mb: int | None = Field(None, ge=0)
    storage: str | None = None
    gpus: int | None = None
    tpu: Any = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allow_internet: bool | None = None
    env: dict[str, Any] = {}
    mcp_servers: list[Any] = []
    skills_dir: str | None = None
    workdir: str | None = None
    healthcheck: _Healthcheck | None = None


class _Agent(_Part):
    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: str | None = None


class _Verifier(_Part):
    timeout_sec: Seconds = 600.0
    env: dict[str, Any] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _Environment | None = None
    collect: list[Any] = []


class _Solution(_Part):
    env: dict[str, Any] = {}


class _Artifact(_Part):
    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class _Config(_Part):
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    artifacts: list[str | _Artifact] = Field([])
    steps: list[Any] = []


def read_harbor(folder: Path, tuning: Tuning) -> Task:
    """The task in a folder. Raises Unsupported with every reason."""
    try:
        config = _Config.model_validate(tomllib.loads(read_text(folder / FILE)))
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        raise Unsupported([f"{FILE}: {why}" for why in faults(error)]) from error
    return _Reader(folder, config, tuning).task()


class _Reader:
    def __init__(self, folder: Path, config: _Config, tuning: Tuning) -> None:
        self._folder = folder
        self._config = config
        self._tuning = tuning
        self._reasons: list[str] = []

    def task(self) -> Task:
        config, tests = self._config, self._folder / "tests"
        self._refuse()
        read = ("instruction.md", "environment", "solution", "tests")
        self._reasons += leaving(self._folder, *(self._folder / name for name in read))
        composed = self._composed(self._folder / "environment")
        script = read_text(tests / "test.sh") if (tests / "test.sh").is_file() else ""
        machine = self._machine(composed, script)
        if not script:
            self._reasons.append("there is no tests/test.sh")
        instruction = read_text(self._folder / "instruction.md")
        oracle = self._oracle()
        if self._reasons:
            raise Unsupported(self._reasons)
        tuned = self._tuning.of(self._folder.name)
        expected = expected_tests(tests, script) if tuned.expected_tests is None else tuned.expected_tests
        return Task(
            id=self._folder.name,
            kind=str(config.metadata.get("category") or "harbor"),
            instruction=instruction.strip(),
            setup="",
            check="",
            oracle=oracle,
            oracle_answer="done" if oracle else "",
            expected_tests=expected,
            machine=machine,
            services=composed.services,
            notes=self._notes(),
        )

    def _refuse(self) -> None:
        config, environment = self._config, self._config.environment
        unless = {
            "[[steps]]: tasks of several steps": config.steps,
            f"environment.os {environment.os}": environment.os != "linux",
            "it wants GPUs": environment.gpus,
            "it wants TPUs": environment.tpu,
            "environment.mcp_servers": environment.mcp_servers,
            "network_mode allowlist: sandboxes have no network": environment.network_mode == "allowlist"
            or config.agent.network_mode == "allowlist",
            "[[verifier.collect]]: the agent's processes are gone by then": config.verifier.collect,
            "an artifact of another service": any(
                isinstance(item, _Artifact) and item.service not in (None, SERVICE) for item in config.artifacts
            ),
            "an artifact with exclude": any(isinstance(item, _Artifact) and item.exclude for item in config.artifacts),
        }
        self._reasons += [reason for reason, wanted in unless.items() if wanted]

    def _machine(self, composed: Composed, script: str) -> Machine:
        config, environment = self._config, self._config.environment
        image = self._image(self._folder / "environment", environment, composed)
        env = interpolate_all(environment.env, "environment.env", self._reasons)
        return Machine(
            format="harbor",
            image=image,
            grading=self._grading(script),
            user=str(config.agent.user) if config.agent.user is not None else composed.user,
            workdir=environment.workdir or composed.workdir,
            env=composed.env | env,
            start=composed.start,
            healthcheck=_healthcheck(environment.healthcheck) or composed.healthcheck,
            folders=["/logs/agent", LOGS, ARTIFACTS],
            oracle_folder=SOLUTION,
            cpus=environment.cpus or composed.cpus or 1.0,
            memory_mb=environment.memory_mb or _megabytes(environment.memory) or composed.memory_mb or 2048,
            storage_mb=environment.storage_mb or _megabytes(environment.storage) or 10240,
            agent_timeout_s=self._tuning.agent_s(config.agent.timeout_sec),
        )

    def _composed(self, folder: Path) -> Composed:
        found = compose_file(folder)
        # Harbor lays the file over one of its own, which has the machine.
        return read_compose(found, SERVICE, _COMPOSE, self._reasons, required=False) if found else Composed()

    def _image(self, folder: Path, environment: _Environment, composed: Composed) -> ImageSource:
        timeout_s = self._tuning.build_s(environment.build_timeout_sec)
        reference = environment.docker_image or ""
        if composed.image is not None:
            return composed.image.model_copy(update={"timeout_s": timeout_s})
        if (folder / "Dockerfile").is_file():
            return ImageSource(context=str(folder.resolve()), reference=reference, timeout_s=timeout_s)
        if not reference:
            self._reasons.append(f"there is neither {folder.name}/Dockerfile nor docker_image")
        return ImageSource(reference=reference, timeout_s=timeout_s)

    def _grading(self, script: str) -> Grading:
        config, verifier = self._config, self._config.verifier
        separate = (verifier.environment_mode or ("separate" if verifier.environment else "shared")) == "separate"
        tuned = self._tuning.of(self._folder.name)
        artifacts = [Artifact(source=path) for path in tuned.artifacts] if tuned.artifacts is not None else None
        if separate and artifacts is None:
            given = [_artifact(item) for item in config.artifacts]
            artifacts = [*given, Artifact(source=ARTIFACTS)]
        user = "" if verifier.user is None else str(verifier.user)
        return Grading(
            tests=[str((self._folder / "tests").resolve())],
            command=f"{TESTS}/test.sh",
            timeout_s=self._tuning.verifier_s(verifier.timeout_sec),
            reads=Reads.REWARD_FILE,
            rewards=written_rewards(self._folder / "tests", script),
            logs=LOGS,
            user=user,
            env=interpolate_all(verifier.env, "verifier.env", self._reasons),
            image=self._own_image() if separate else None,
            artifacts=artifacts,
            may_change=tuned.may_change,
        )

    def _own_image(self) -> ImageSource | None:
        """The image of a separate verifier, where it is not a fresh copy of the task's own."""
        environment, tests = self._config.verifier.environment, self._folder / "tests"
        if compose_file(tests):
            self._reasons.append("a verifier with a compose file of its own")
        if environment is None and not (tests / "Dockerfile").is_file():
            return None
        return self._image(tests, environment or _Environment(), Composed())

    def _oracle(self) -> list[str]:
        folder = self._folder / "solution"
        if not (folder / "solve.sh").is_file():
            return []
        env = interpolate_all(self._config.solution.env, "solution.env", self._reasons)
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in env.items())
        run = f"chmod +x {SOLUTION}/solve.sh && DEBIAN_FRONTEND=noninteractive {variables}{SOLUTION}/solve.sh"
        return oracle_commands(folder_files(folder), SOLUTION, run)

    def _notes(self) -> list[str]:
        environment = self._config.environment
        public = environment.network_mode == "public" or environment.allow_internet
        declared = [] if environment.network_mode or environment.allow_internet is not None else ["by default"]
        if public or declared:
            return [" ".join(["it may use the network", *declared, "and does not get any"])]
        return []


def _artifact(item: str | _Artifact) -> Artifact:
    if isinstance(item, str):
        return Artifact(source=item)
    return Artifact(source=item.source, destination=item.destination or "")


def _healthcheck(given: _Healthcheck | None) -> Healthcheck | None:
    if given is None:
        return None
    return Healthcheck(
        command=given.command,
        interval_s=given.interval_sec,
        timeout_s=given.timeout_sec,
        start_s=given.start_period_sec,
        retries=given.retries,
    )


def _megabytes(size: str | None) -> int:
    try:
        return megabytes(size) if size else 0
    except ValueError as error:
        raise Unsupported([f"{FILE}: {error}"]) from error
