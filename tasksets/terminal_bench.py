"""Terminal-Bench tasks, read as they are: task.yaml, Dockerfile or docker-compose.yaml, tests, solution.sh.

Owns what of the format Ratchet understands, and the reasons for what it does not. The verifier is `run-tests.sh`; what
an answer is worth stands in the summary that pytest prints. Called by `tasksets.folder`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from tasksets.base import Artifact, Grading, ImageSource, Machine, Reads, Seconds, Task
from tasksets.compose import Composed, compose_file, read_compose
from tasksets.oracle import oracle_commands
from tasksets.pytests import expected_tests
from tasksets.reading import TESTS, Tuning, Unsupported, faults, leaving, read_text

FILE = "task.yaml"
LOGS = "/logs"
SOLUTION = "/oracle"
SERVICE = "client"
SCRIPT = "run-tests.sh"
SOLUTIONS = ("solution.sh", "solution.yaml")
_COMPOSE = dict.fromkeys(
    (
        "T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME",
        "T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME",
        "T_BENCH_TASK_DOCKER_NAME_PREFIX",
        "T_BENCH_TASK_LOGS_PATH",
        "T_BENCH_TASK_AGENT_LOGS_PATH",
    ),
    "",
) | {
    "T_BENCH_TEST_DIR": TESTS,
    "T_BENCH_CONTAINER_LOGS_PATH": LOGS,
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
}


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore")

    instruction: str
    category: str = "software_engineering"
    parser_name: str = "pytest"
    max_agent_timeout_sec: Seconds = 360.0
    max_test_timeout_sec: Seconds = 60.0
    run_tests_in_same_shell: bool = False


def read_terminal_bench(folder: Path, tuning: Tuning) -> Task:
    """The task in a folder. Raises Unsupported with every reason."""
    try:
        found = yaml.safe_load(read_text(folder / FILE))
        config = _Config.model_validate(found)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unsupported([f"{FILE}: {why}" for why in faults(error)]) from error
    reasons: list[str] = []
    if config.parser_name != "pytest":
        reasons.append(f"parser {config.parser_name!r}: there is only pytest's")
    if config.run_tests_in_same_shell:
        reasons.append("run_tests_in_same_shell: the agent's shell is gone before the tests run")
    script = folder / SCRIPT
    if not script.is_file():
        reasons.append(f"there is no {SCRIPT}")
    reasons += leaving(folder, *(folder / name for name in (SCRIPT, "Dockerfile", "tests", *SOLUTIONS)))
    composed, image = _environment(folder, tuning, reasons)
    oracle = _oracle(folder)
    if reasons:
        raise Unsupported(reasons)
    tuned, tests = tuning.of(folder.name), folder / "tests"
    expected = expected_tests(tests, read_text(script)) if tuned.expected_tests is None else tuned.expected_tests
    grading = Grading(
        tests=[str(path.resolve()) for path in (tests, script) if path.exists()],
        command=f"bash {TESTS}/{SCRIPT}",
        timeout_s=tuning.verifier_s(config.max_test_timeout_sec),
        reads=Reads.PYTEST_SUMMARY,
        logs=LOGS,
        env={"TEST_DIR": TESTS},
        artifacts=[Artifact(source=path) for path in tuned.artifacts] if tuned.artifacts is not None else None,
        may_change=tuned.may_change,
    )
    machine = Machine(
        format="terminal-bench",
        image=image,
        grading=grading,
        user=composed.user,
        workdir=composed.workdir,
        env=composed.env,
        start=composed.start,
        healthcheck=composed.healthcheck,
        folders=[LOGS, "/agent-logs"],
        oracle_folder=SOLUTION,
        cpus=composed.cpus or 1.0,
        memory_mb=composed.memory_mb or 2048,
        agent_timeout_s=tuning.agent_s(config.max_agent_timeout_sec),
    )
    return Task(
        id=folder.name,
        kind=config.category,
        instruction=config.instruction.strip(),
        setup="",
        check="",
        oracle=oracle,
        oracle_answer="done" if oracle else "",
        expected_tests=expected,
        machine=machine,
        services=composed.services,
        notes=["it may use the network and does not get any"],
    )


def _environment(folder: Path, tuning: Tuning, reasons: list[str]) -> tuple[Composed, ImageSource]:
    found = compose_file(folder)
    composed = read_compose(found, SERVICE, _COMPOSE, reasons) if found is not None else Composed()
    image = composed.image
    if image is None and (folder / "Dockerfile").is_file():
        image = ImageSource(context=str(folder.resolve()))
    if image is None:
        reasons.append("there is no Dockerfile, and no image in a compose file")
        image = ImageSource()
    return composed, image.model_copy(update={"timeout_s": tuning.build_s(image.timeout_s)})


def _oracle(folder: Path) -> list[str]:
    script, steps = (folder / name for name in SOLUTIONS)
    if script.is_file():
        return oracle_commands({"solution.sh": script}, SOLUTION, f"bash {SOLUTION}/solution.sh")
    return _typed(steps) if steps.is_file() else []


def _typed(path: Path) -> list[str]:
    """The commands of a solution.yaml in one shell; what is typed into a running program is no solution here."""
    try:
        steps: list[dict[str, Any]] = yaml.safe_load(read_text(path)) or []
        whole = all(step.get("append_enter", True) for step in steps)
        return ["\n".join(str(step["command"]) for step in steps)] if steps and whole else []
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Unsupported([f"{path.name}: {' '.join(str(error).split())[:200]}"]) from error
