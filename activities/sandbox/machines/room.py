"""The machine in which an answer is graded, from its start to its removal.

Owns what is mounted there and the folder on the host that it comes from: `<state>/grading/<sandbox id>/`, closed to
other users, with the tests, the runner, the report and the verifier's logs. Called by `Examiner`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from activities.sandbox.boxes import named_disk
from activities.sandbox.channel import BOX, TOOLS
from activities.sandbox.container import Bind, SandboxSpec
from activities.sandbox.containers import Sandbox
from activities.sandbox.docker import GRADING, DockerBackend
from activities.sandbox.machines.kit import INSIDE as KIT
from activities.sandbox.machines.report import INSIDE, RUNNER, Report
from activities.sandbox.machines.storage import Storage
from tasksets.base import Grading
from tasksets.reading import TESTS


@dataclass(frozen=True)
class Room:
    sandbox: Sandbox
    report: Report
    logs: Path
    kit: bool

    def storage(self, backend: DockerBackend, most_mb: int) -> Storage:
        """What of the host's disk it may take."""
        folders = [backend.boxes.box(self.sandbox.id), self.logs, self.report.folder]
        return Storage(backend, self.sandbox.id, most_mb, folders)


def mount_points(grading: Grading) -> list[str]:
    """Folders of the grading machine that are the host's."""
    return [TESTS, grading.logs, KIT, BOX, TOOLS, RUNNER, INSIDE]


@asynccontextmanager
async def opened(
    backend: DockerBackend, grading: Grading, spec: SandboxSpec, labels: dict[str, str], kit: Path | None
) -> AsyncIterator[Room]:
    """A started machine that is gone afterwards. `labels`: its attempt, kind and generation. Raises SandboxError."""
    sandbox_id = backend.id_of(labels["attempt"], labels["kind"], int(labels["generation"]))
    folder = backend.state / GRADING / sandbox_id
    report = Report(folder)
    try:
        # An earlier try may have left one.
        await backend.close(sandbox_id)
        with named_disk():
            await asyncio.to_thread(_lay_out, folder, grading, report)
        binds = [
            *spec.binds,
            Bind(str(report.runner), RUNNER),
            Bind(str(report.folder), INSIDE, read_only=False),
            Bind(str(folder / "logs"), grading.logs, read_only=False),
            *([] if grading.image else [Bind(str(folder / "tests"), TESTS)]),
            *([Bind(str(kit), KIT)] if kit else []),
        ]
        sandbox = await backend.acquire(replace(spec, binds=tuple(binds)), labels)
        yield Room(sandbox, report, folder / "logs", kit is not None)
    finally:
        # Its folder goes with it.
        await backend.close(sandbox_id)


def _lay_out(folder: Path, grading: Grading, report: Report) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    report.lay_out()
    (folder / "logs").mkdir()
    (folder / "logs").chmod(0o777)
    tests = folder / "tests"
    tests.mkdir()
    for source in map(Path, grading.tests):
        if source.is_dir():
            shutil.copytree(source, tests, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, tests / source.name)
    # The copy is as open as the formats' own programs leave it; what is mounted of it is read-only.
    tests.chmod(0o755)
    script = PurePosixPath(grading.command.split()[-1])
    if script.is_relative_to(TESTS) and (tests / script.relative_to(TESTS)).is_file():
        (tests / script.relative_to(TESTS)).chmod(0o755)
