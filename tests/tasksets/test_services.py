"""Services beside the sandbox, as tasks of every format name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasksets import open_taskset
from tasksets.base import Service, Task
from tasksets.folder import FolderTaskset
from tests.tasksets.public import HARBOR, TERMINAL_BENCH, one, reasons, write_task
from workflows.contracts import Split
from workflows.errors import InvalidConfig

EXAMPLE = Path(__file__).parents[2] / "examples/tasks/api"
NATIVE = """
kind = "k"
instruction = "i"
setup = "true"
check = "exit 0"
"""
SHOP = """
name = "shop"
start = "httpd -f"
healthcheck = { command = "true" }
env = { A = "1", B = "2" }
"""
COMPOSE = TERMINAL_BENCH["docker-compose.yaml"]
WEB = """
  web:
    build: ./web
    depends_on: { db: { condition: service_healthy } }
    networks: { default: { aliases: [shop] } }
    expose: [8000]
  db:
    image: postgres:16
    hostname: database
    command: postgres -c fsync=off
    entrypoint: [/start.sh]
    user: postgres
    environment: { POSTGRES_PASSWORD: x }
    volumes: ["rows:/var/lib/postgresql/data"]
    healthcheck: { test: [CMD, pg_isready, -U, shop], interval: 200ms, retries: 50 }
    deploy: { resources: { limits: { cpus: "0.5", memory: 512M } } }
"""


def native(folder: Path, text: str) -> Task:
    (folder / "one.toml").write_text(NATIVE + text)
    return FolderTaskset(folder).load("one")


def test_a_native_task_takes_a_service_from_a_file_and_says_the_rest_itself(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/shop.toml").write_text(SHOP)
    task = native(tmp_path, '[[services]]\nfile = "services/shop.toml"\nmemory_mb = 200\nenv.B = "3"\n')
    [shop] = task.services
    assert (shop.name, shop.start, shop.memory_mb, shop.env) == ("shop", "httpd -f", 200, {"A": "1", "B": "3"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[services]]\nfile = "nowhere.toml"\n', "there is no nowhere.toml"),
        (f"[[services]]\n{SHOP}[[services]]\n{SHOP}", "names of their own"),
        (f"[[services]]\n{SHOP}".replace('"shop"', '"localhost"'), "none is localhost"),
        (f"[[services]]\n{SHOP}".replace('"shop"', '"a shop"'), "services.0.name"),
        ('[[services]]\nname = "shop"\nstart = "httpd -f"\n', "when it is ready"),
        (f"[[services]]\n{SHOP}memory_mb = 64\n", "memory_mb is 160 at least"),
        (f"[[services]]\n{SHOP}[services.image]\nsource = {{}}\n", "image belongs to the public formats"),
        ("services = 3\n", "services"),
    ],
)
def test_a_service_that_cannot_be_had_is_the_files_fault(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        native(tmp_path, text)


def test_the_variable_of_a_state_is_one_that_a_shell_can_name() -> None:
    assert Service(name="web-shop.2").variable == "STATE_WEB_SHOP_2"


def test_a_compose_file_with_several_services_is_read_in_the_order_in_which_they_start(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "shop", TERMINAL_BENCH, **{"docker-compose.yaml": COMPOSE + WEB})
    db, web = one(folder).services
    assert (db.name, web.name) == ("db", "web")
    assert db.image is not None and web.image is not None
    assert db.image.source.reference == "postgres:16" and web.image.source.context == str(folder / "web")
    assert (db.image.entrypoint, db.image.command) == (["/start.sh"], ["postgres", "-c", "fsync=off"])
    assert (web.image.entrypoint, web.image.command) == (None, None)
    assert (db.aliases, web.aliases) == (["database"], ["shop"])
    assert (db.cpus, db.memory_mb, db.image.user, db.env) == (0.5, 512, "postgres", {"POSTGRES_PASSWORD": "x"})
    assert db.healthcheck is not None and db.healthcheck.command == "pg_isready -U shop"
    assert web.healthcheck is None


def test_harbors_compose_file_may_leave_the_machine_out(tmp_path: Path) -> None:
    compose = "services:\n  db: {image: 'redis:7'}\n"
    task = one(write_task(tmp_path / "one", HARBOR, **{"environment/docker-compose.yaml": compose}))
    assert [service.name for service in task.services] == ["db"]
    assert task.machine is not None and task.machine.image.context == str(tmp_path / "one/environment")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("  a: {image: a, expose: [80]}\n  b: {image: b, ports: ['8080:80/tcp']}\n", "a and b both want port 80"),
        ("  a: {image: a, depends_on: [b]}\n  b: {image: b, depends_on: [a]}\n", "depend on each other: a, b"),
        (
            "  a: {image: a}\n  b: {image: b, depends_on: {a: {condition: service_completed_successfully}}}\n",
            "service b waits for another's end",
        ),
        ("  a: {image: a, volumes: ['v:/a']}\n  b: {image: b, volumes: ['v:/b']}\n", "service a: volume v:/a"),
        ("  a: {image: a, privileged: true}\n", "service a: privileged"),
        ("  a: {image: a, environment: [KEY]}\n", "service a: it needs the host's variable KEY"),
        ("  a: {environment: {KEY: b}}\n", "service a: neither build nor image"),
        ("  a: {build: ../elsewhere}\n", "service a: build.context ../elsewhere is outside of the task"),
        ("  a b: {image: a}\n", "name"),
        ("  a:\n", "there are no services"),
    ],
)
def test_what_services_cannot_have_is_told_with_their_name(tmp_path: Path, text: str, why: str) -> None:
    assert why in reasons(tmp_path, TERMINAL_BENCH, **{"docker-compose.yaml": COMPOSE + text})


def test_the_example_has_tasks_of_each_kind_in_both_splits_and_says_what_its_oracles_show() -> None:
    taskset = open_taskset(str(EXAMPLE))
    for split, count in ((Split.TRAIN, 8), (Split.HELD_OUT, 3)):
        tasks = [taskset.load(task_id) for task_id in taskset.ids(split)]
        kinds = [task.kind for task in tasks]
        assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
            ("look-up", "correct", "find-and-correct"), count
        )
        assert all(len(task.oracle) == len(task.oracle_observations) for task in tasks)
        assert all([service.name for service in task.services] == ["shop"] for task in tasks)
