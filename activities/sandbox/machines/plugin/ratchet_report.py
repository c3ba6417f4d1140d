"""A pytest plugin that reports what each test did, signed, into a folder of the host's.

Runs in the verifier's own interpreter, whatever that is (Python 3.6 and newer, any pytest of these years): standard
library only. Promises: the key is read and taken away before any test or candidate code is imported, so what is
imported later finds none; every line is signed over its place in the report; a session that does not end well leaves no
key for another. Mounted by `Examiner`, read by `activities.sandbox.machines.report`.
"""

import hashlib
import hmac
import json
import os
import sys
from typing import Any

FOLDER = "/run/ratchet/report"
SAFE = "ratchet"
"""The value of PYTHONSAFEPATH that is for pytest's own imports and for nothing after them."""


def _take_key() -> bytes:
    """The key, which is then nowhere else; empty where another process of this verifier has it."""
    path = os.path.join(FOLDER, "key")
    try:
        with open(path, "rb") as file:
            key = file.read()
        os.remove(path)
    except OSError:
        return b""
    return key


def _leave_key(key: bytes) -> None:
    with open(os.path.join(FOLDER, "key.part"), "wb") as file:
        file.write(key)
    os.rename(os.path.join(FOLDER, "key.part"), os.path.join(FOLDER, "key"))


class Reporter:
    """One session of pytest."""

    def __init__(self, key: bytes, root: str) -> None:
        self._key = key
        self._root = root
        self._count = 0
        self.began = False

    def _write(self, entry: Any) -> None:
        text = json.dumps(entry, sort_keys=True)
        mac = hmac.new(self._key, f"{self._count} {text}".encode(), hashlib.sha256).hexdigest()
        self._count += 1
        with open(os.path.join(FOLDER, "lines"), "a") as file:
            file.write(f"{mac} {text}\n")

    def _absolute(self, nodeid: str) -> str:
        path, separator, test = nodeid.partition("::")
        return os.path.normpath(os.path.join(self._root, path)) + separator + test

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = report.outcome
        if hasattr(report, "wasxfail") and outcome == "skipped":
            outcome = "xfailed"
        if report.when == "call" or outcome != "passed":
            self._write({"test": self._absolute(report.nodeid), "outcome": outcome})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write({"test": self._absolute(report.nodeid), "outcome": "error"})

    def pytest_sessionstart(self) -> None:
        self.began = True

    def pytest_sessionfinish(self, exitstatus: Any) -> None:
        self._write({"finished": int(exitstatus), "count": self._count})
        _leave_key(hashlib.sha256(b"next " + self._key).digest())

    def pytest_unconfigure(self) -> None:
        """What only told of itself, as `pytest --help`, had no session: the next one has this key."""
        if not self.began:
            _leave_key(self._key)


def pytest_load_initial_conftests(early_config: Any) -> None:
    """Before the first of the tests' own modules: the working folder is where `python -m pytest` has it."""
    if os.environ.get("PYTHONSAFEPATH") == SAFE:
        del os.environ["PYTHONSAFEPATH"]
        if getattr(sys.flags, "safe_path", False) and os.path.basename(sys.argv[0]) == "__main__.py":
            sys.path.insert(0, os.getcwd())


def pytest_configure(config: Any) -> None:
    key = _take_key()
    if key:
        root = str(getattr(config, "rootpath", None) or config.rootdir)
        config.pluginmanager.register(Reporter(key, root), "ratchet-report")
