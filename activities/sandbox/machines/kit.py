"""What verifiers of the public formats fetch from the network before they test, for sandboxes that have none.

Most of their scripts install curl, then uv with it, then pytest with that. The kit is a read-only folder, first in the
verifier's PATH, in which those programs answer without a network: apt-get has nothing to do, curl and wget hand out
uv's installer, uv and pip find their packages in a folder of wheels. Owns the folder, made once per set of packages
from this machine's own uv and package index; what can't be had is left out, and the verifier says that it misses it.
Called by `Examiner`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from activities.sandbox.boxes import named_disk
from tasksets.base import Grading

log = logging.getLogger(__name__)

INSIDE = "/opt/ratchet-kit"
DOWNLOAD_S = 300.0
ALWAYS = (
    "pytest",
    "colorama",
    "exceptiongroup",
    "iniconfig",
    "tomli",
    "typing-extensions",
    "pip",
    "setuptools",
    "wheel",
)
"""uv resolves for every platform at once, and wants what only others need as well."""
_FETCHES = re.compile(r"\b(?:apt-get|apt|curl|wget|uvx?|pip3?)\s")
_REQUIREMENT = re.compile(r"[A-Za-z][\w.-]*(?:\[[\w,.-]+\])?(?:[=<>~!]=?=?[\w.*]+)?")
_INSTALL = (("uv", "add"), ("pip", "install"), ("pip3", "install"), ("tool", "install"))
_WITH = ("--with", "-w", "--from")
_TAKES = ("-r", "-c", "-i", "-f", "-p", "--python", "--index-url", "--find-links", "--requirement", "--target", "-t")
"""Options whose value is no package."""
_SETTING = 'mkdir -p "$HOME/.local/bin" && : > "$HOME/.local/bin/env"'
_SCRIPTS = {
    "apt-get": "#!/bin/sh\nexit 0\n",
    "curl": f"""#!/bin/sh
case "$*" in *astral.sh/uv*) printf '%s\\n' '{_SETTING}'; exit 0 ;; esac
PATH=${{PATH#{INSIDE}/bin:}}; exec curl "$@"
""",
    "wget": f"""#!/bin/sh
case "$*" in *astral.sh/uv*) printf '%s\\n' '{_SETTING}'; exit 0 ;; esac
PATH=${{PATH#{INSIDE}/bin:}}; exec wget "$@"
""",
}
_UV = """#!/bin/sh
# A Python that is asked for by its version can't be fetched: the machine's own has to do where there is no such one.
# What comes after the name of a program is that program's.
has() { command -v "python$1" > /dev/null 2>&1; }
state=option seen=0 first=
for word; do
    shift
    case "$state" in
    skip) state=option; continue ;;
    value) state=option ;;
    option)
        case "$word" in
        -p | --python) has "$1" && state=value || { state=skip; continue; } ;;
        --python=*) has "${word#*=}" || continue ;;
        -w | --with | --from | --with-requirements | --index-url | --extra | --group | --directory) state=value ;;
        -*) ;;
        *)
            seen=$((seen + 1)) first=${first:-$word}
            case "NAME $first $seen" in "uvx $first 1" | "uv run 2") state=rest ;; esac ;;
        esac ;;
    esac
    set -- "$@" "$word"
done
exec INSIDE/lib/NAME "$@"
"""


def kit_environment() -> dict[str, str]:
    """Variables for a verifier that has the kit. Caches lie where nobody can have put anything."""
    wheels = f"{INSIDE}/wheels"
    return {
        "UV_OFFLINE": "1",
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": wheels,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_CACHE_DIR": f"/var/tmp/ratchet-{secrets.token_hex(8)}",
        "UV_NO_CONFIG": "1",
        # Of a project beside the answer neither the environment nor the places of its packages.
        "UV_PROJECT_ENVIRONMENT": f"/var/tmp/ratchet-{secrets.token_hex(8)}/venv",
        "UV_NO_SOURCES": "1",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def script_of(grading: Grading) -> str:
    """All shell that a verifier brings."""
    files = [
        path for source in map(Path, grading.tests) for path in ([source] if source.is_file() else source.rglob("*.sh"))
    ]
    return "\n".join(path.read_text(errors="replace") for path in sorted(files) if path.suffix == ".sh")


def requirements(script: str) -> list[str]:
    """Packages that a script installs, as it names them. Example: ["pytest==8.4.1"]."""
    found: set[str] = set()
    for line in script.replace("\\\n", " ").splitlines():
        try:
            words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
        except ValueError:
            continue
        found |= _of_command(words)
    return sorted(found)


def _of_command(words: list[str]) -> set[str]:
    found: set[str] = set()
    installs = False
    before = ""
    for word in words:
        if set(word) <= set("();<>|&"):
            installs = False
        elif before in _WITH or (installs and not word.startswith("-") and before not in _TAKES):
            found.update(name for name in word.split(",") if _REQUIREMENT.fullmatch(name))
        installs = installs or (before, word) in _INSTALL
        before = word
    return found


class Kits:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._making = asyncio.Lock()
        self._incomplete: dict[str, Path] = {}

    async def kit(self, grading: Grading) -> Path | None:
        """The kit that a verifier needs; None for one that fetches nothing."""
        script = await asyncio.to_thread(script_of, grading)
        if grading.image is not None or not _FETCHES.search(script):
            return None
        async with self._making:
            with named_disk():
                return await asyncio.to_thread(self._made, requirements(script))

    def _made(self, wanted: list[str]) -> Path:
        uv = _uv()
        digest = hashlib.sha256(repr((wanted, ALWAYS, _SCRIPTS, _UV, uv and uv.stat().st_size)).encode()).hexdigest()
        folder = self._incomplete.get(digest) or self._root / digest[:16]
        if folder.is_dir():
            return folder
        self._root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._root, prefix="making-") as temporary:
            fresh = Path(temporary) / "kit"
            (fresh / "bin").mkdir(parents=True)
            (fresh / "wheels").mkdir()
            for name, text in (_SCRIPTS | {"apt": _SCRIPTS["apt-get"]}).items():
                _write_script(fresh / "bin" / name, text)
            if uv is not None:
                _add_uv(fresh, uv)
            fresh.chmod(0o755)
            if not _downloaded(fresh / "wheels", [*ALWAYS, *wanted]):
                # Another process may find more.
                folder = self._root / f"{digest[:16]}-{secrets.token_hex(4)}.part"
                self._incomplete[digest] = folder
            with suppress(OSError):  # another process was first
                fresh.rename(folder)
        return folder


def _uv() -> Path | None:
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}") or shutil.which("uv")
    return Path(found).resolve() if found else None


def _add_uv(fresh: Path, uv: Path) -> None:
    (fresh / "lib").mkdir()
    for name in ("uv", "uvx"):
        source = uv.with_name(name)
        if source.is_file():
            shutil.copyfile(source, fresh / "lib" / name)
            (fresh / "lib" / name).chmod(0o755)
            _write_script(fresh / "bin" / name, _UV.replace("INSIDE", INSIDE).replace("NAME", name))


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _downloaded(folder: Path, wanted: list[str]) -> bool:
    """Whether all that is wanted is there: at once, or else one by one as far as it goes."""
    if not _download(folder, wanted):
        return True
    missed = {name: said for name in wanted if (said := _download(folder, [name]))}
    for name, said in missed.items():
        log.warning("verifiers that install %s will miss it: %s", name, said)
    return not missed


def _download(folder: Path, wanted: list[str]) -> str:
    """Why it failed; empty where it did not."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    try:
        subprocess.run([*command, "--dest", str(folder), *wanted], check=True, capture_output=True, timeout=DOWNLOAD_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        return said[-1] if said else str(error)
    return ""
