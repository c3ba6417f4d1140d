"""Containers of the compose file's services on a machine without a registry, from images made here.

One Debian from debootstrap holds PostgreSQL and what workers need; the project, its virtual environment and the
interpreter are mounted, as they are gigabytes that lie here already. All are in the host's network, on loopback ports:
a daemon whose bridge has no way out will do.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.sandbox.machines import BASES
from tests.stack import free_ports
from workers.stack.parts import SEARCH_ATTRIBUTES, TEMPORAL_TUNING

PROJECT = Path(__file__).resolve().parents[2]
IMAGE = "ratchet-test/services:bookworm-1"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = (
    "postgresql-15",
    "busybox-static",
    "gcc",
    "libc6-dev",
    "libnuma1",
    "libgomp1",
    "libsqlite3-0",
    "tini",
    "ca-certificates",
)
POSTGRES = """set -e
as_postgres() { setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }
chown postgres "$D"
if [ ! -e "$D/data" ]; then
  printf %s "$PW" >"$D/pw"
  chown postgres "$D/pw"
  as_postgres initdb -E UTF8 --locale=C.UTF-8 -D "$D/data" -U ratchet -A scram-sha-256 --pwfile "$D/pw" -N
  rm "$D/pw"
fi
rm -f "$D/data/postmaster.pid"
exec setpriv --reuid=postgres --regid=postgres --clear-groups \\
  postgres -D "$D/data" -k "$D" -c listen_addresses=127.0.0.1 -c port="$PORT"
"""
"""As the entry point of PostgreSQL's own image: makes the data on the first start."""
PORTS = ("temporal", "temporal_http", "temporal_metrics", "ui", "s3", "postgres", "engine", "metrics")


def ensure_image(docker_host: str) -> None:
    """The image of all services, made with debootstrap where it is missing, and kept for other daemons."""
    archive = BASES / f"{IMAGE.replace('/', '-').replace(':', '-')}.tar"
    if not archive.is_file():
        BASES.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ratchet-services-") as folder:
            root = Path(folder) / "root"
            include = f"--include={','.join(PACKAGES)}"
            subprocess.run(
                ["debootstrap", "--variant=minbase", include, "bookworm", root, MIRROR], check=True, capture_output=True
            )
            for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/man", "usr/share/locale"):
                shutil.rmtree(root / waste, ignore_errors=True)
            fresh = archive.with_suffix(f".{os.getpid()}.part")
            with tarfile.open(fresh, "w", format=tarfile.PAX_FORMAT) as tar:
                tar.add(root, ".", filter=lambda entry: None if entry.isdev() else entry)
            fresh.replace(archive)
    change = "ENV PATH=/usr/lib/postgresql/15/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        ["docker", "-H", docker_host, "import", "--change", change, archive, IMAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Services:
    """The services by their names in the compose file, started in its order, each to be killed and started again."""

    def __init__(self, folder: Path, docker_host: str) -> None:
        self._folder = folder
        self._docker_host = docker_host
        self._prefix = f"ratchet-test-{secrets.token_hex(4)}"
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self._keys = {name: secrets.token_hex(16) for name in ("access", "secret", "password")}
        self.started: list[str] = []
        interpreter = Path(sys.base_prefix)
        self._read_only = [PROJECT, Path(sys.prefix), interpreter]

    # --- addresses ----------------------------------------------------------------------------------------------------

    @property
    def temporal(self) -> str:
        return f"127.0.0.1:{self.ports['temporal']}"

    @property
    def database_url(self) -> str:
        return f"postgresql://ratchet:{self._keys['password']}@127.0.0.1:{self.ports['postgres']}/ratchet"

    def state(self, service: str) -> Path:
        path = self._folder / service
        path.mkdir(exist_ok=True)
        return path

    def environment(self, service: str) -> dict[str, str]:
        return {
            "RATCHET_HOME": str(self.state(service)),
            "RATCHET_DATABASE_URL": self.database_url,
            "RATCHET_S3_ENDPOINT": f"http://127.0.0.1:{self.ports['s3']}",
            "RATCHET_S3_ACCESS_KEY": self._keys["access"],
            "RATCHET_S3_SECRET_KEY": self._keys["secret"],
            "RATCHET_ENGINES": f"local-e0=http://127.0.0.1:{self.ports['engine']}",
            "RATCHET_ENGINE_PORT": str(self.ports["engine"]),
            "RATCHET_METRICS_PORT": str(self.ports["metrics"]),
            "TEMPORAL_ADDRESS": self.temporal,
            "HOME": str(self.state(service)),
            "PYTHONPATH": str(PROJECT),
            "PATH": f"{Path(sys.executable).parent}:/usr/lib/postgresql/15/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    # --- the services -------------------------------------------------------------------------------------------------

    def lineage_db(self) -> None:
        data = self.state("lineage-db")
        env = {"D": str(data), "PW": self._keys["password"], "PORT": str(self.ports["postgres"])}
        self._run("lineage-db", ["sh", "-c", POSTGRES], env)
        self.until(lambda: self.execute("lineage-db", "pg_isready", "-h", "127.0.0.1", "-p", env["PORT"]) == 0)
        create = [
            "psql",
            f"postgresql://ratchet:{self._keys['password']}@127.0.0.1:{env['PORT']}/postgres",
            "-c",
            "CREATE DATABASE ratchet",
        ]
        self.until(lambda: self.execute("lineage-db", *create) == 0)

    def s3(self) -> None:
        env = {"RCLONE_AUTH_KEY": f'"{self._keys["access"]},{self._keys["secret"]}"', "RCLONE_CONFIG": ""}
        command = ["rclone", "serve", "s3", "--addr", f"127.0.0.1:{self.ports['s3']}", str(self.state("s3"))]
        self._run("s3", command, self.environment("s3") | env)

    def temporal_server(self) -> None:
        ports = self.ports
        command = [
            "temporal",
            "server",
            "start-dev",
            "--ip",
            "127.0.0.1",
            "--ui-ip",
            "127.0.0.1",
            "--log-level",
            "warn",
        ]
        command += ["--port", str(ports["temporal"]), "--http-port", str(ports["temporal_http"])]
        command += ["--metrics-port", str(ports["temporal_metrics"]), "--ui-port", str(ports["ui"])]
        command += ["--db-filename", f"{self.state('temporal')}/temporal.db"]
        command += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"]
        for value in TEMPORAL_TUNING:
            command += ["--dynamic-config-value", value]
        for attribute in SEARCH_ATTRIBUTES:
            command += ["--search-attribute", attribute]
        self._run("temporal", command, self.environment("temporal"))

    def prepare(self) -> None:
        """Runs to its end, again where it came too early, as `restart: on-failure` does."""

        def prepared() -> bool:
            name = f"{self._prefix}-prepare"
            command = [sys.executable, "-m", "workers.stack.prepare", "--namespace"]
            done = subprocess.run(
                [
                    "docker",
                    "-H",
                    self._docker_host,
                    "run",
                    "--rm",
                    "--name",
                    name,
                    *self._options(self.environment("prepare")),
                    IMAGE,
                    *command,
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            self.last_words = done.stderr[-2000:]
            return done.returncode == 0

        self.until(prepared)

    def worker(self, role: str) -> None:
        env = self.environment(role) | {"RATCHET_HOST": "local", "RATCHET_SANDBOX_HOSTS": "local"}
        self._run(role, [sys.executable, "-m", "workers.roles", role], env)

    def sandbox(self) -> None:
        """The only one with the daemon's socket, and without a key to database or object store."""
        kept = {
            name: value
            for name, value in self.environment("sandbox").items()
            if not name.startswith(("RATCHET_S3_", "RATCHET_DATABASE_"))
        }
        env = kept | {"RATCHET_HOST": "local", "RATCHET_SANDBOX_HOSTS": "local"}
        socket = f"{self._docker_host.removeprefix('unix://')}:/var/run/docker.sock"
        command = [sys.executable, "-m", "workers.roles", "sandbox"]
        self._run("sandbox", command, env, ["--volume", socket, "--pid", "host"])

    def engines(self) -> None:
        env = self.environment("engines") | {"RATCHET_PARTS": "vllm,engines", "RATCHET_ENGINE_COUNT": "1"}
        self._run("engines", [sys.executable, "-m", "workers.host"], env, ["--shm-size", "1g"])

    # --- by the daemon ------------------------------------------------------------------------------------------------

    def kill(self, service: str) -> None:
        self._docker("kill", f"{self._prefix}-{service}")

    def start_again(self, service: str) -> None:
        """Docker takes its own `kill` for a wish, after which a restart policy rests; whoever watches starts it."""
        self._docker("start", f"{self._prefix}-{service}")

    def execute(self, service: str, *command: str) -> int:
        done = subprocess.run(
            ["docker", "-H", self._docker_host, "exec", f"{self._prefix}-{service}", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        self.last_words = done.stdout + done.stderr
        return done.returncode

    def logs(self, service: str) -> str:
        done = subprocess.run(
            ["docker", "-H", self._docker_host, "logs", "--tail", "30", f"{self._prefix}-{service}"],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    def running(self) -> dict[str, str]:
        found = {}
        for service in self.started:
            shown = subprocess.run(
                [
                    "docker",
                    "-H",
                    self._docker_host,
                    "inspect",
                    "--format",
                    "{{json .State.Status}}",
                    f"{self._prefix}-{service}",
                ],
                capture_output=True,
                text=True,
                check=True,
            )
            found[service] = json.loads(shown.stdout)
        return found

    def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, getattr(self, "last_words", "")
            time.sleep(0.5)

    def close(self) -> None:
        for service in reversed(self.started):
            subprocess.run(
                ["docker", "-H", self._docker_host, "rm", "--force", f"{self._prefix}-{service}"],
                capture_output=True,
                check=False,
            )

    def _run(self, service: str, command: list[str], env: dict[str, str], extra: list[str] | None = None) -> None:
        self.started.append(service)
        name = f"{self._prefix}-{service}"
        options = ["--detach", "--restart", "unless-stopped", "--stop-timeout", "30", *(extra or [])]
        self._docker("run", "--name", name, *options, *self._options(env), IMAGE, "tini", "-s", "--", *command)

    def _options(self, env: dict[str, str]) -> list[str]:
        options = ["--network", "host", "--workdir", str(PROJECT)]
        for path in self._read_only:
            options += ["--volume", f"{path}:{path}:ro"]
        options += ["--volume", f"{self._folder}:{self._folder}"]
        for name, value in env.items():
            options += ["--env", f"{name}={value}"]
        return options

    def _docker(self, *arguments: str) -> None:
        done = subprocess.run(
            ["docker", "-H", self._docker_host, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"docker {arguments[:3]}: {done.stderr}"
