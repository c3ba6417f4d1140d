"""Print a run's input made from an example: `run_input.py EXAMPLE --set seed=1 --set training.steps=5`.

Values are JSON, or else taken as text. Used by the demo; an unknown field is refused when the run starts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def override(run: dict[str, Any], assignment: str) -> None:
    """Set one field, dotted for a section's, to the value behind the `=`."""
    path, separator, text = assignment.partition("=")
    if not separator:
        raise SystemExit(f"--set {assignment}: write FIELD=VALUE")
    *sections, field = path.split(".")
    for section in sections:
        run = run.setdefault(section, {})
    try:
        run[field] = json.loads(text)
    except json.JSONDecodeError:
        run[field] = text


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a run's input made from an example.")
    parser.add_argument("example", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    run = json.loads(arguments.example.read_text())
    for assignment in arguments.set:
        override(run, assignment)
    print(json.dumps(run, indent=2))


if __name__ == "__main__":
    main()
