"""The read-only folder of trusted tools that every sandbox gets: a static busybox, its applets, sbxd, snap, forward and
run.sh.

Owns the one build step of the sandbox: its programs are compiled at first use. The folder's name is the hash of what
it is made from, so that it is built once per machine and never changed; it appears whole or not at all. Called by
`Containers`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from workflows.errors import SandboxError

log = logging.getLogger(__name__)

SBXD_SOURCES = sorted(Path(__file__).with_name("sbxd").glob("*.[ch]"))
UNITS = {
    "sbxd": ("sbxd.c", "command.c", "kernel.c"),
    "snap": ("snap.c", "kernel.c"),
    "forward": ("forward.c",),
}
"""What each program is compiled from."""
RUN_SCRIPT = Path(__file__).with_name("run.sh")


def find_busybox() -> Path:
    """The machine's static busybox. Raises SandboxError (final) where there is none."""
    for name in ("busybox-static", "busybox"):
        found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/bin:/usr/bin:/sbin")
        if found and b"/ld-" not in Path(found).read_bytes()[:4096]:
            return Path(found).resolve()
    raise SandboxError("no static busybox on this machine; scripts/install-docker.sh installs it", retryable=False)


def applets(busybox: Path) -> list[str]:
    """Names that busybox answers to, in its own order."""
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True, timeout=10)
    return [name for name in listed.stdout.split() if name != "busybox"]


def build_toolbox(cache: Path) -> Path:
    """The toolbox below `cache`, built if it isn't there. Blocking: about a second once, then nothing."""
    busybox = find_busybox()
    parts = [path.read_bytes() for path in (busybox, *SBXD_SOURCES, RUN_SCRIPT)]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    folder = cache / digest[:16]
    if has_sbxd(folder) or (folder.is_dir() and shutil.which("gcc") is None):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as temporary:
        fresh = Path(temporary) / "tools"
        (fresh / "bin").mkdir(parents=True)
        shutil.copyfile(busybox, fresh / "bin" / "busybox")
        shutil.copyfile(RUN_SCRIPT, fresh / "run.sh")
        for name in applets(busybox):
            (fresh / "bin" / name).symlink_to("busybox")
        _compile(fresh)
        for path in (fresh / "bin" / "busybox", fresh / "run.sh", fresh, fresh / "bin"):
            path.chmod(0o755)
        if folder.is_dir() and not has_sbxd(folder):
            # Built before there was a compiler; containers that have it mounted keep theirs.
            with suppress(OSError):
                folder.rename(cache / f"{folder.name}-without-sbxd")
        try:
            fresh.rename(folder)
        except OSError:
            # Another process built the same content first; it is mounted somewhere already.
            if not folder.is_dir():
                raise
    return folder


def has_sbxd(toolbox: Path) -> bool:
    return (toolbox / "sbxd").is_file()


def _compile(folder: Path) -> None:
    """Compile the programs; where that fails the sandboxes fall back on `docker exec`, have no snapshots, say so."""
    source = SBXD_SOURCES[0].parent
    try:
        for name, units in UNITS.items():
            command = ["gcc", "-static", "-O2", "-o", str(folder / name), *(str(source / unit) for unit in units)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        log.warning("sbxd can't be built (%s); sandboxes use docker exec, which is some 30 times slower", detail)
        for name in UNITS:
            (folder / name).unlink(missing_ok=True)
