"""Services beside machines of the public formats: a compose file's, with images of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasksets.base import Task
from tests.sandbox.conftest import docker
from tests.sandbox.machines import Ground, terminal_bench
from tests.tasksets.public import TERMINAL_BENCH
from workflows.errors import SandboxError, VerifierBrokenByAnswer

pytestmark = pytest.mark.docker

SERVER = """
import http.server, os, sqlite3, sys

if sys.argv[1:]:
    script = "CREATE TABLE words (word); INSERT INTO words VALUES ('plum')"
    sqlite3.connect("/srv/words.db").executescript(script)
    sys.exit()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(1)
        with sqlite3.connect("/srv/words.db") as connection:
            if self.path != "/":
                connection.execute("UPDATE words SET word = ?", (self.path[1:],))
            word = connection.execute("SELECT word FROM words").fetchone()[0]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(word.encode())

http.server.HTTPServer(("", 80), Handler).serve_forever()
"""
DOCKERFILE = """FROM python:3.11-slim-bookworm
COPY server.py /srv/
RUN python3 /srv/server.py make
CMD [ "python3", "/srv/server.py" ]
"""
ASK = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://{host}{path}\").read().decode())'"
COMPOSE = (
    TERMINAL_BENCH["docker-compose.yaml"]
    + """
  web:
    build: ./web
    hostname: shop
    healthcheck:
      test: [CMD, python3, -c, "import urllib.request as r; r.urlopen('http://127.0.0.1/')"]
      interval: 200ms
"""
)
TEST = """import urllib.request

def test_the_word():
    assert urllib.request.urlopen("http://web/").read() == b"pear"
"""


def ask(path: str, host: str = "web") -> str:
    return ASK.format(host=host, path=path)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return terminal_bench(
        tmp_path,
        **{
            "docker-compose.yaml": COMPOSE,
            "web/Dockerfile": DOCKERFILE,
            "web/server.py": SERVER,
            "tests/test_outputs.py": TEST,
            "solution.sh": f"#!/bin/bash\n{ask('/pear')}\n",
        },
    )


async def test_a_machine_reaches_its_service_and_the_verifier_asks_it_what_the_agent_made_of_it(
    ground: Ground, task: Task
) -> None:
    async with ground.playing(task) as attempt:
        assert await attempt.out(ask("/")) == "plum" == await attempt.out(ask("/", host="shop"))
        assert await attempt.oracle() == ""
        verdict = await attempt.verdict()
        assert (verdict.passed, verdict.tampered) == (True, False), verdict.detail
    async with ground.playing(task) as another:
        assert await another.out(ask("/")) == "plum"
        assert not (await another.verdict()).passed


async def test_a_service_of_its_own_image_has_the_walls_of_a_machine(
    ground: Ground, task: Task, docker_host: str
) -> None:
    async with ground.playing(task) as attempt:
        [service] = ground.backend.boxes.services(attempt.id).values()
        shown = docker(docker_host, "inspect", "-f", "{{.HostConfig.CapDrop}} {{.HostConfig.NetworkMode}}", service)
        assert shown.startswith("[ALL] container:") and await attempt.out("ls /sys/class/net") == "lo"
        assert "httpd" not in await attempt.out("cat /proc/[0-9]*/cmdline")
        assert (await attempt("echo 1.2.3.4 web >> /etc/hosts")).exit_code != 0
    assert docker(docker_host, "ps", "-aq", "--filter", f"name={service}") == ""


async def test_a_machines_service_that_only_this_agent_brings_down_is_the_agents_doing(
    ground: Ground, task: Task
) -> None:
    async with ground.playing(task) as attempt:
        await attempt(ask("/die"))
        with pytest.raises(VerifierBrokenByAnswer, match="the service web is not healthy any more"):
            await attempt.verdict()


async def test_a_service_with_nothing_to_run_or_with_volumes_is_named(
    ground: Ground, task: Task, tmp_path: Path
) -> None:
    for dockerfile, why in (
        (DOCKERFILE.replace('CMD [ "python3", "/srv/server.py" ]', "CMD []"), "says what it runs"),
        (f"{DOCKERFILE}VOLUME /srv\n", "keeps /srv in volumes"),
        (DOCKERFILE.replace('"/srv/server.py"', '"/srv/nothing.py"'), "the service web: it does not get healthy"),
    ):
        changes = {"docker-compose.yaml": COMPOSE, "web/Dockerfile": dockerfile, "web/server.py": SERVER}
        odd = terminal_bench(tmp_path, **changes)
        with pytest.raises(SandboxError, match=why):
            async with ground.playing(odd):
                pass
