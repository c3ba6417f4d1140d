"""What `ratchet align` prints, and its errors in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from workers.align import Aligned, Options, align
from workers.settings import Settings
from workflows.config import model_folder
from workflows.errors import RatchetError


def run_align(
    settings: Settings, model: str, given: Mapping[str, object], *, as_json: bool, say: Callable[[str], None]
) -> int:
    """Exit code: 0 aligned, 1 not, or not measured."""
    console = Console(soft_wrap=True)
    folder = Path(model)
    if not (folder / "config.json").is_file():
        folder = model_folder(model, settings.home_path / "models")
    if not (folder / "config.json").is_file():
        console.print(f"no model in {model!r} and none of that name in {settings.home_path / 'models'}", markup=False)
        return 1
    try:
        found = align(folder.resolve(), Options.model_validate(given), say)
    except ValidationError as error:
        for mistake in error.errors(include_url=False):
            console.print(f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}", markup=False)
        return 1
    except RatchetError as error:
        console.print(str(error), markup=False)
        return 1
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        render(found, console)
    return 0 if found.good else 1


def render(found: Aligned, console: Console) -> None:
    """Distances in nats; best first, then what run.json can't say."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    mixture = any(row.routing for row in found.rows)
    for name in ("engine", "trainer", "attention", *(["experts"] if mixture else [])):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "mismatch_kl", "worst case", "max", "mean |Δ|", "max |Δ|", "|Δ| > 0.1"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        figures = (row.mismatch_kl, row.mismatch_kl_worst, row.mismatch_kl_max, row.mismatch_abs, row.mismatch_abs_max)
        cells = [
            row.engine_dtype,
            row.trainer_dtype,
            row.attention,
            *([row.routing] if mixture else []),
            str(row.tokens),
        ]
        style = "" if row.possible else "dim"
        table.add_row(*cells, *(f"{value:.1e}" for value in figures), f"{row.far_share:.2%}", style=style)
    # As wide as its content: a narrow terminal folds the line itself, and nothing is cut.
    console.width = max(console.width, Console(width=10_000, markup=False, highlight=False).measure(table).maximum)
    console.print(table)
    best = found.rows[0]
    words = json.dumps(found.recommended).strip("{}")
    console.print(Text(f'recommended: "training": {{{words}}}; its worst case is {best.worst}'))
    if not found.good:
        console.print(Text("even that is beyond training.max_mismatch_kl: a run would stop", style="bold red"))
