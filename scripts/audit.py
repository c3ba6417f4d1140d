"""Known vulnerabilities of every package in .venv, by pip-audit. Called by `make audit` and by CI.

Exit code 0: all were looked up and none has one. 1: some have, or some packages nobody could look up. 3: the database
of advisories answered for none, so nothing is known; the caller decides what that means.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import Any

VULNERABLE, UNKNOWN = 1, 3
OURS = "ratchet"


def installed() -> list[str]:
    """Each package but our own, pinned. A local build (2.13.0+cpu) counts as the release that it was built from, since
    advisories know no other."""
    found = {(item.metadata["Name"].lower(), item.version.partition("+")[0]) for item in metadata.distributions()}
    return sorted(f"{name}=={version}" for name, version in found if name != OURS)


def asked(packages: list[str]) -> list[dict[str, Any]]:
    """One entry per package: its `vulns`, or the `skip_reason`; empty where the database does not answer at all."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(packages))
        file.flush()
        words = ["-r", file.name, "--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"]
        done = subprocess.run([sys.executable, "-m", "pip_audit", *words], capture_output=True, text=True, check=False)
    try:
        return list(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError):
        print(done.stderr.strip().rpartition("\n")[2], file=sys.stderr)
        return []


def judged(entries: list[dict[str, Any]]) -> tuple[list[str], int]:
    """What to say, and the exit code."""
    bad = [
        f"{entry['name']} {entry['version']}: {vuln['id']}, mended in {', '.join(vuln['fix_versions']) or 'no version'}"
        for entry in entries
        for vuln in entry.get("vulns", [])
    ]
    skipped = [entry["name"] for entry in entries if "skip_reason" in entry]
    if len(skipped) == len(entries):
        return ["NOT AUDITED: the database of advisories can't be reached from here, so nothing is known"], UNKNOWN
    lines = [*bad, *(f"{name}: nobody could look it up" for name in skipped)]
    return lines or [f"{len(entries)} packages, no known vulnerability"], VULNERABLE if lines else 0


def main() -> int:
    lines, code = judged(asked(installed()))
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
