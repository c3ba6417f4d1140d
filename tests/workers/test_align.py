"""`ratchet align`: a real engine and a real trainer on the same weights."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.generation.policies import save_policy
from workers.align import ENGINE, Aligned, Options, _while_it_lives, align
from workers.align_cli import render
from workers.cli import app
from workflows.errors import EngineError


@pytest.mark.engine
def test_engine_and_trainer_of_one_dtype_agree_at_every_temperature_and_composition(tmp_path: Path) -> None:
    model = tmp_path / "policy"
    save_policy(model, seed=0)
    said: list[str] = []
    found = align(model, Options(dtypes=("float32",), prompts=4, tokens=8, temperatures=(0.6, 1.3)), said.append)
    assert [(row.engine_dtype, row.trainer_dtype) for row in found.rows] == [("float32", "float32")] * 2
    assert {row.attention for row in found.rows} == {"sdpa", "eager"} and len(said) == 3
    assert found.good and found.recommended["dtype"] == "float32"
    for row in found.rows:
        assert row.mismatch_kl_worst < 1e-8 and row.mismatch_abs_max < 1e-3 and row.far_share == 0
        assert 2 * 2 * 2 * 4 <= row.tokens <= 2 * 2 * 2 * 4 * 8
    assert not list(Path(tempfile.gettempdir()).glob(f"ratchet-*/{ENGINE}")), "nothing of its engines is left"
    assert Aligned.model_validate(json.loads(found.model_dump_json())) == found
    out = io.StringIO()
    render(found, Console(file=out, width=40))
    assert "mismatch_kl" in out.getvalue() and out.getvalue().count("float32") >= 4, "nothing is cut"


def test_what_can_not_be_compared_is_said_in_a_sentence(tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["align", "nowhere"], env={"RATCHET_HOME": str(tmp_path)})
    assert missing.exit_code == 1 and "no model in 'nowhere' and none of that name in" in missing.output
    model = tmp_path / "models" / "policy"
    save_policy(model, seed=0)
    wrong = CliRunner().invoke(app, ["align", "policy", "--dtypes", "fp8"], env={"RATCHET_HOME": str(tmp_path)})
    assert wrong.exit_code == 1 and "dtypes.0: Input should be 'float32' or 'bfloat16'" in wrong.output


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ValueError('no such layer')", "ended with code 1: ValueError: no such layer"),
        ("print('out of memory', flush=True); import os; os.kill(os.getpid(), 9)", "ended with code -9: out of memory"),
        ("pass", "ended with code 0:"),
    ],
)
async def test_an_engine_that_dies_while_it_starts_is_said_at_once(tmp_path: Path, program: str, said: str) -> None:
    path = tmp_path / "logs" / f"{ENGINE}.log"
    path.parent.mkdir()
    with path.open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=log, stderr=log)
    with pytest.raises(EngineError, match=re.escape(said)):
        await _while_it_lives(process, asyncio.Event().wait(), tmp_path)
    process.wait()
