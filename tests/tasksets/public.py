"""Small tasks in the public formats, written as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasksets import Task
from tasksets.base import Grading
from tasksets.folder import FolderTaskset
from workflows.contracts import Split
from workflows.errors import InvalidConfig

HARBOR: dict[str, str] = {
    "task.toml": """
version = "1.0"
[metadata]
category = "files"
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
[environment]
build_timeout_sec = 300.0
memory = "1G"
cpus = 2
[environment.env]
COLOUR = "red"
SHADE = "${SHADE:-dark}"
""",
    "instruction.md": "Write hello to /app/greeting.txt.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "solution/solve.sh": "#!/bin/bash\necho hello > /app/greeting.txt\n",
    "tests/test.sh": """#!/bin/bash
pytest /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
""",
    "tests/test_outputs.py": """from pathlib import Path
import pytest

@pytest.fixture
def testing():
    return 1

def test_exists():
    assert Path("/app/greeting.txt").is_file()

@pytest.mark.parametrize("word", ["hello"])
def test_says(word):
    assert Path("/app/greeting.txt").read_text().strip() == word

class TestMore:
    def test_one(self):
        pass
    def helper(self):
        pass
""",
}
TERMINAL_BENCH: dict[str, str] = {
    "task.yaml": """
instruction: |-
  Write hello to greeting.txt in the current directory.
author_name: anonymous
difficulty: easy
category: files
tags: [a, b]
parser_name: pytest
max_agent_timeout_sec: 90.0
max_test_timeout_sec: 30.0
run_tests_in_same_shell: false
""",
    "Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "docker-compose.yaml": """
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
""",
    "run-tests.sh": "#!/bin/bash\npytest $TEST_DIR/test_outputs.py -rA\n",
    "solution.sh": "#!/bin/bash\necho hello > greeting.txt\n",
    "tests/test_outputs.py": HARBOR["tests/test_outputs.py"],
}

COMPOSE = TERMINAL_BENCH["docker-compose.yaml"]


def write_task(folder: Path, files: dict[str, str], **changes: str | None) -> Path:
    """The folder with these files; a change is another text, None leaves the file out."""
    for name, text in (files | changes).items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
    return folder


def one(folder: Path) -> Task:
    """The only task of a folder that is one."""
    taskset = FolderTaskset(folder)
    return taskset.load(taskset.ids(Split.TRAIN)[0])


def reasons(folder: Path, files: dict[str, str], **changes: str | None) -> str:
    """Why a task can't be used."""
    write_task(folder / "fine", HARBOR)
    write_task(folder / "odd", files, **changes)
    taskset = FolderTaskset(folder)
    assert taskset.ids(Split.TRAIN) == ["fine"]
    with pytest.raises(InvalidConfig, match="can't be used"):
        taskset.load("odd")
    return "; ".join(taskset.unsupported["odd"])


def grading_of(task: Task) -> Grading:
    assert task.machine is not None
    return task.machine.grading
