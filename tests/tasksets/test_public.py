"""Tasks of the public formats are read as they are; what Ratchet can't run is reported, and the rest is a taskset."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasksets import open_taskset
from tasksets.base import Artifact, Reads
from tasksets.folder import FolderTaskset
from tasksets.oracle import MOST_BYTES, PIECE, oracle_commands
from tasksets.reading import Unsupported, interpolate
from tests.tasksets.public import COMPOSE, HARBOR, TERMINAL_BENCH, grading_of, one, reasons, write_task
from workflows.contracts import Split
from workflows.errors import InvalidConfig


def test_a_harbor_task_is_read_as_it_is(tmp_path: Path) -> None:
    task = one(write_task(tmp_path / "greet", HARBOR))
    assert (task.id, task.kind, task.instruction) == ("greet", "files", "Write hello to /app/greeting.txt.")
    machine = task.machine
    assert machine is not None and machine.format == "harbor"
    assert machine.image.context == str(tmp_path / "greet/environment") and machine.image.timeout_s == 300
    assert (machine.cpus, machine.memory_mb, machine.storage_mb, machine.agent_timeout_s) == (2, 1024, 10240, 120)
    assert machine.env == {"COLOUR": "red", "SHADE": "dark"}
    grading = machine.grading
    assert grading.tests == [str(tmp_path / "greet/tests")] and grading.command == "/tests/test.sh"
    assert (grading.timeout_s, grading.reads, grading.logs) == (60, Reads.REWARD_FILE, "/logs/verifier")
    assert grading.artifacts is None and grading.image is None
    assert task.expected_tests == [
        "test_outputs.py::test_exists",
        "test_outputs.py::test_says",
        "test_outputs.py::TestMore::test_one",
    ]
    assert task.notes == ["it may use the network by default and does not get any"]
    assert len(task.oracle) == 1 and "/solution/solve.sh" in task.oracle[0]


def test_a_terminal_bench_task_is_read_as_it_is(tmp_path: Path) -> None:
    task = one(write_task(tmp_path / "greet", TERMINAL_BENCH))
    assert (task.id, task.kind) == ("greet", "files")
    machine = task.machine
    assert machine is not None and machine.format == "terminal-bench"
    assert machine.image.context == str(tmp_path / "greet") and machine.start == []
    assert machine.env == {"TEST_DIR": "/tests"} and machine.agent_timeout_s == 90
    grading = machine.grading
    assert grading.tests == [str(tmp_path / "greet/tests"), str(tmp_path / "greet/run-tests.sh")]
    assert (grading.command, grading.timeout_s) == ("bash /tests/run-tests.sh", 30)
    assert grading.reads is Reads.PYTEST_SUMMARY and len(task.expected_tests) == 3
    assert task.oracle[0].endswith("bash /oracle/solution.sh")


def test_what_terminal_bench_leaves_out_has_its_defaults(tmp_path: Path) -> None:
    files = {"task.yaml": "instruction: Do it.\n", "Dockerfile": "FROM debian\n", "run-tests.sh": "pytest $TEST_DIR\n"}
    task = one(write_task(tmp_path / "bare", files, **{"solution.yaml": "- command: touch a\n- command: touch b\n"}))
    assert task.machine is not None and task.machine.agent_timeout_s == 360 and task.machine.grading.timeout_s == 60
    assert (task.kind, task.oracle, task.expected_tests) == ("software_engineering", ["touch a\ntouch b"], [])


def test_formats_lie_side_by_side_and_the_place_decides_the_split(tmp_path: Path) -> None:
    write_task(tmp_path / "a", HARBOR)
    write_task(tmp_path / "train/b", TERMINAL_BENCH)
    write_task(tmp_path / "held_out/c", TERMINAL_BENCH)
    (tmp_path / "d.toml").write_text('kind = "k"\ninstruction = "i"\nsetup = ""\ncheck = "exit 0"\n')
    (tmp_path / "dataset.json").write_text('{"name": "not a task"}')
    (tmp_path / "notes").mkdir()
    taskset = open_taskset(str(tmp_path))
    assert taskset.ids(Split.TRAIN) == ["a", "b", "d"] and taskset.ids(Split.HELD_OUT) == ["c"]
    assert [taskset.load(name).machine is None for name in ("a", "b", "c", "d")] == [False, False, False, True]


def test_a_task_folder_is_a_taskset_of_one_whatever_else_lies_in_it(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "greet", HARBOR, **{"train/data.json": "[1]", "held_out/x.toml": "nonsense"})
    (tmp_path / "ratchet.toml").write_text("timeout_multiplier = 2.0\n")
    task = one(folder)
    assert task.id == "greet" and task.machine is not None and task.machine.grading.timeout_s == 120


def test_phases_are_granted_more_and_tasks_are_tuned_beside_their_files(tmp_path: Path) -> None:
    write_task(tmp_path / "greet", HARBOR)
    write_task(tmp_path / "bench", TERMINAL_BENCH)
    (tmp_path / "ratchet.toml").write_text(
        """
        timeout_multiplier = 2.0
        verifier_timeout_multiplier = 3.0
        [tasks.greet]
        may_change = ["/usr/lib/python3"]
        artifacts = ["/app/greeting.txt"]
        expected_tests = ["test_outputs.py::test_says"]
        """
    )
    taskset = FolderTaskset(tmp_path)
    machine, bench = taskset.load("greet").machine, taskset.load("bench").machine
    assert machine is not None and bench is not None
    assert (machine.agent_timeout_s, machine.grading.timeout_s, machine.image.timeout_s) == (240, 180, 600)
    assert machine.grading.artifacts == [Artifact(source="/app/greeting.txt")]
    assert machine.grading.may_change == ["/usr/lib/python3"]
    assert taskset.load("greet").expected_tests == ["test_outputs.py::test_says"]
    assert bench.grading.artifacts is None and bench.image.timeout_s == 1200
    (tmp_path / "ratchet.toml").write_text("speed = 2\n")
    with pytest.raises(InvalidConfig, match="speed"):
        FolderTaskset(tmp_path)


def test_a_separate_verifier_gets_the_artifacts_and_an_image_of_its_own(tmp_path: Path) -> None:
    toml = 'artifacts = ["/app/x", {source = "/b", destination = "/c"}]\n' + HARBOR["task.toml"]
    separate = toml.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
    grading = grading_of(one(write_task(tmp_path / "one", HARBOR, **{"task.toml": separate})))
    assert grading.artifacts is not None
    assert [item.source for item in grading.artifacts] == ["/app/x", "/b", "/logs/artifacts"]
    assert grading.artifacts[1].destination == "/c" and grading.image is None
    shared = grading_of(one(write_task(tmp_path / "two", HARBOR, **{"task.toml": toml})))
    assert shared.artifacts is None
    built = {"task.toml": separate, "tests/Dockerfile": "FROM debian\nCOPY . /tests\n"}
    grading = grading_of(one(write_task(tmp_path / "three", HARBOR, **built)))
    assert grading.image is not None and grading.image.context == str(tmp_path / "three/tests")
    named = toml + '[verifier.environment]\ndocker_image = "org/verifier:1"\n'
    grading = grading_of(one(write_task(tmp_path / "four", HARBOR, **{"task.toml": named})))
    assert grading.image is not None and grading.image.reference == "org/verifier:1"


@pytest.mark.parametrize(
    ("added", "why"),
    [
        ("[[steps]]\nname = 'a'\n", "several steps"),
        ("[environment]\ngpus = 1\n", "GPUs"),
        ("[environment]\nos = 'windows'\n", "windows"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a']\n", "allowlist"),
        ("[[environment.mcp_servers]]\nname = 'm'\n", "mcp_servers"),
        ("[[verifier.collect]]\ncommand = 'x'\n", "collect"),
        ("[verifier.env]\nKEY = '${OPENAI_API_KEY}'\n", "verifier.env: KEY needs the host's variable OPENAI_API_KEY"),
        ("[environment]\nmemory = 'lots'\n", "'lots' is no size"),
        ("[agent]\ntimeout_sec = 'long'\n", "timeout_sec"),
        ("[agent\n", "task.toml"),
    ],
)
def test_a_harbor_task_that_wants_more_is_left_out_with_the_reason(tmp_path: Path, added: str, why: str) -> None:
    assert why in reasons(tmp_path, HARBOR, **{"task.toml": added})


@pytest.mark.parametrize("name", ["tests/test.sh", "environment/Dockerfile", "instruction.md"])
def test_a_harbor_task_without_a_part_is_left_out(tmp_path: Path, name: str) -> None:
    assert Path(name).name in reasons(tmp_path, HARBOR, **{name: None})


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    toml = "[environment]\ngpus = 1\nos = 'windows'\n"
    told = reasons(tmp_path, HARBOR, **{"task.toml": toml, "tests/test.sh": None})
    assert "GPUs" in told and "windows" in told and "test.sh" in told


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("    privileged: true\n", "privileged"),
        ("    cap_add: [SYS_ADMIN, CHOWN]\n", "capabilities SYS_ADMIN"),
        ("    network_mode: host\n", "network_mode host"),
        ("    devices: [/dev/kvm]\n", "devices"),
        ("    runtime: nvidia\n", "runtime: nvidia"),
        ("    entrypoint: /start.sh\n", "entrypoint"),
        ("    deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}\n", "devices"),
        ("    extra_hosts: [a:1.2.3.4]\n", "extra_hosts"),
        ("  db:\n    image: postgres\n    volumes: ['./data:/data']\n", "service db: volume ./data:/data"),
        ("    user: ${SOMEBODY}\n", "variable SOMEBODY"),
        ("    mem_limit: lots\n", "no size"),
        ("    healthcheck: {test: 'true', interval: soon}\n", "no duration"),
        ("    : :\n", "docker-compose.yaml"),
    ],
)
def test_a_compose_file_that_wants_more_is_left_out_with_the_reason(tmp_path: Path, line: str, why: str) -> None:
    assert why in reasons(tmp_path, TERMINAL_BENCH, **{"docker-compose.yaml": COMPOSE + line})


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("      dockerfile: Dockerfile\n", "      context: ..\n", "outside of the task"),
        ("      dockerfile: Dockerfile\n", "      dockerfile: ../../../etc/shadow\n", "outside of its context"),
        ("      dockerfile: Dockerfile\n", "      ssh: default\n", "build.ssh"),
        ("T_BENCH_TASK_LOGS_PATH}:", "HOME}:", "variable HOME"),
        ("${T_BENCH_TASK_LOGS_PATH}:", "/etc:", "volume /etc:/logs"),
        ("  client:", "  main:", "no service 'client'"),
    ],
)
def test_a_compose_file_that_reaches_out_is_left_out(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert why in reasons(tmp_path, TERMINAL_BENCH, **{"docker-compose.yaml": COMPOSE.replace(old, new)})


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("parser_name: pytest", "parser_name: swebench", "parser 'swebench'"),
        ("in_same_shell: false", "in_same_shell: true", "run_tests_in_same_shell"),
        ("instruction:", "instructions:", "instruction"),
        ("difficulty: easy", "difficulty: [", "task.yaml"),
    ],
)
def test_a_terminal_bench_task_that_wants_more_is_left_out(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert why in reasons(tmp_path, TERMINAL_BENCH, **{"task.yaml": TERMINAL_BENCH["task.yaml"].replace(old, new)})


def test_what_a_compose_file_says_of_the_machine_is_kept(tmp_path: Path) -> None:
    more = """    command: [ "/start.sh", "now" ]
    working_dir: /srv
    user: app
    deploy: {resources: {limits: {cpus: "1.5", memory: 3g}}}
    healthcheck: {test: [CMD, curl, localhost], interval: 2s, timeout: 1m, retries: 7}
"""
    compose = COMPOSE.replace('    command: [ "sh", "-c", "sleep infinity" ]\n', more)
    compose = compose.replace("      dockerfile: Dockerfile\n", "      dockerfile: other\n      args: {A: 1}\n")
    files = {"docker-compose.yaml": compose}
    machine = one(write_task(tmp_path / "served", TERMINAL_BENCH, **files)).machine
    assert machine is not None
    assert (machine.start, machine.workdir, machine.user) == (["/start.sh", "now"], "/srv", "app")
    assert (machine.cpus, machine.memory_mb, machine.image.dockerfile) == (1.5, 3072, "other")
    assert machine.image.args == {"A": "1"}
    check = machine.healthcheck
    assert check is not None and (check.command, check.interval_s, check.retries) == ("curl localhost", 2.0, 7)
    assert check.timeout_s == 60


def test_where_no_task_can_be_used_the_first_reasons_are_told(tmp_path: Path) -> None:
    for number in range(5):
        write_task(tmp_path / f"t{number}", HARBOR, **{"task.toml": "[environment]\ngpus = 1\n"})
    with pytest.raises(InvalidConfig, match=r"t0 \(it wants GPUs\).*t2.* and 2 more"):
        FolderTaskset(tmp_path)


def test_a_file_and_a_folder_of_one_name_are_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "same", HARBOR)
    (tmp_path / "same.toml").write_text('kind = "k"\ninstruction = "i"\nsetup = ""\ncheck = ""\n')
    with pytest.raises(InvalidConfig, match="same"):
        FolderTaskset(tmp_path)


def test_a_native_file_has_no_machine(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"kind": "k", "instruction": "", "setup": "", "check": "", "notes": ["as if it were another format"]}'
    )
    with pytest.raises(InvalidConfig, match="public formats"):
        FolderTaskset(tmp_path)


def test_an_oracles_commands_write_its_files_byte_for_byte_and_run_them(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub dir").mkdir(parents=True)
    contents = {
        "solve.sh": b"#!/bin/sh\necho \"it's\" $(cat '%s/sub dir/big')x | wc -c > result\n" % str(target).encode(),
        "sub dir/big": bytes(range(256)) * (PIECE // 100),
        "empty": b"",
        "no newline": b"plain",
        "quotes": b"'" * 5000 + b"\n",
    }
    for name, data in contents.items():
        (source / name).write_bytes(data)
    (source / "solve.sh").chmod(0o755)
    commands = oracle_commands({name: source / name for name in contents}, str(target), f"{target}/solve.sh")
    assert len(commands) > 1 and max(len(command) for command in commands) < 4 * PIECE
    for command in commands:
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, timeout=20)
    assert {name: (target / name).read_bytes() for name in contents} == contents
    assert (tmp_path / "result").is_file()


def test_a_solution_that_is_too_large_is_a_reason(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(Unsupported, match="the solution has more than"):
        oracle_commands({"big": tmp_path / "big"}, "/solution", "true")


def test_variables_are_read_as_compose_reads_them() -> None:
    missing: list[str] = []
    assert interpolate("${A}-$A-${B:-b}-$$-${C}", {"A": "a"}, missing) == "a-a-b-$-"
    assert missing == ["C"]


def test_a_dollar_in_harbors_variables_is_itself(tmp_path: Path) -> None:
    toml = HARBOR["task.toml"] + 'PASSWORD = "a$b$$"\n'
    machine = one(write_task(tmp_path / "t", HARBOR, **{"task.toml": toml})).machine
    assert machine is not None and machine.env["PASSWORD"] == "a$b$$"


@pytest.mark.parametrize(
    ("command", "starts"),
    [
        ('["sh", "-c", "sleep infinity"]', False),
        ("bash", False),
        ("/bin/bash -l", False),
        ("tail -f /dev/null", False),
        ('["bash", "-lc", "sleep 7d"]', False),
        ("bash /app/start.sh", True),
        ('["sh", "-c", "sleep 2; /srv/serve"]', True),
        ('["sh", "-c", "sleep 2;/srv/serve"]', True),
        ('["bash", "-lc", "/srv/serve"]', True),
        ('["sh", "-c", "tail -f /var/log/x & /srv/serve"]', True),
    ],
)
def test_a_command_that_does_more_than_wait_runs_beside_the_agent(tmp_path: Path, command: str, starts: bool) -> None:
    compose = COMPOSE.replace('[ "sh", "-c", "sleep infinity" ]', command)
    machine = one(write_task(tmp_path / "t", TERMINAL_BENCH, **{"docker-compose.yaml": compose})).machine
    assert machine is not None and bool(machine.start) is starts
