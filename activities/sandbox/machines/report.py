"""The signed report of a verifier's tests, read on the host.

Owns the key of one verification and the reading of what came of it. A line that is not signed for its place counts for
nothing, and neither does what follows it. What this keeps out: a report that was planted, rewritten, or made up by a
process that was there before or besides the tests. What it can't: code that the tests import into their own process and
that was written against this very report. Called by `Examiner`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PLUGIN = Path(__file__).with_name("plugin") / "ratchet_report.py"
INSIDE = "/run/ratchet/report"
RUNNER = "/run/ratchet/runner"
GOOD = ("passed", "skipped", "xfailed")
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Reported:
    """Tests by their absolute ids without parameters, and whether all that was said of them is good."""

    tests: dict[str, bool]
    ended: bool = True
    """Whether each session of pytest that began came to its end, where it gives the key back."""

    def missing(self, expected: Iterable[str]) -> list[str]:
        """Those of `expected` (`test_outputs.py::test_a`) of which nothing was said."""
        return [test for test in expected if not self._of(test)]

    def failed(self, expected: Iterable[str]) -> list[str]:
        return [test for test in expected if not all(self._of(test))]

    def _of(self, test: str) -> list[bool]:
        return [good for name, good in self.tests.items() if name == test or name.endswith(f"/{test}")]


class Report:
    """Of one verification: `folder` is mounted for the verifier to write, `runner` read-only."""

    def __init__(self, folder: Path) -> None:
        self._key = secrets.token_bytes(32)
        self.folder = folder / "report"
        self.runner = folder / "runner"

    def lay_out(self) -> None:
        self.folder.mkdir(parents=True)
        self.runner.mkdir()
        shutil.copyfile(PLUGIN, self.runner / PLUGIN.name)
        (self.folder / "key").write_bytes(self._key)
        # Whoever the verifier runs as has to take the key away.
        self.folder.chmod(0o777)
        (self.folder / "key").chmod(0o666)

    def environment(self, around: dict[str, str]) -> dict[str, str]:
        """What makes every pytest of the verifier report, over the variables that are there."""
        path = [RUNNER, *filter(None, [around.get("PYTHONPATH")])]
        plugins = [PLUGIN.stem, *filter(None, [around.get("PYTEST_PLUGINS")])]
        return {"PYTHONPATH": ":".join(path), "PYTEST_PLUGINS": ",".join(plugins)}

    def read(self) -> Reported:
        """Blocking."""
        tests: dict[str, bool] = {}
        entries, key = _signed(read_bounded(self.folder / "lines", MOST_BYTES), self._key)
        for entry in entries:
            if name := entry.get("test"):
                path, separator, test = str(name).partition("::")
                name = path + separator + test.partition("[")[0]
                tests[name] = tests.get(name, True) and entry.get("outcome") in GOOD
        return Reported(tests, ended=hmac.compare_digest(read_bounded(self.folder / "key", len(key)), key))


def _signed(data: bytes, key: bytes) -> tuple[list[dict[str, object]], bytes]:
    """The entries, session after session, each under its own key, up to the first that nobody signed; and the key under
    which the next one would be."""
    entries: list[dict[str, object]] = []
    count = 0
    for line in data.decode(errors="replace").splitlines():
        mac, _, text = line.partition(" ")
        expected = hmac.new(key, f"{count} {text}".encode(), hashlib.sha256).hexdigest()
        if not hmac.compare_digest(mac.encode(), expected.encode()):
            break
        entry = json.loads(text)
        entries.append(entry)
        count += 1
        if "finished" in entry:
            count, key = 0, hashlib.sha256(b"next " + key).digest()
    return entries, key


def read_bounded(path: Path, most: int) -> bytes:
    """A file that somebody else may have put there: empty where it is no ordinary one, or has more than `most`."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > most:
        return b""
    return path.read_bytes()
