"""`ratchet align MODEL`: do engine and trainer compute the same probabilities, and in which setting best?

A real engine of each dtype samples answers to tasks at several temperatures, one request at a time and all at once;
the trainer of each dtype and attention scores the same tokens, row by row and in one padded batch, for a mixture of
experts through the engine's experts and through its own. What differs is numerics alone: the weights are the same
files. Everything runs in a temporary folder, beside whatever else is up.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from activities.generation.engine import EngineClient
from activities.generation.harness import initial_messages
from activities.generation.server import EngineSpec, routes_experts
from activities.generation.serving import last_words, serve
from activities.generation.transcript import Template
from tasksets.shell import ShellTaskset
from workers.stack.ports import free_ports
from workers.stack.state import LOOPBACK, scratch_root
from workflows.config import TrainingConfig
from workflows.contracts import EngineInfo, Split
from workflows.errors import EngineError

if TYPE_CHECKING:
    import torch

    from activities.training.batch import Trajectory
    from activities.training.engine import Trainer

START_S = 600.0
LOOK_EVERY_S = 0.5
ENGINE = "align-e0"
Say = Callable[[str], None]


class Options(BaseModel):
    """What is compared."""

    model_config = ConfigDict(frozen=True)

    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    attention: tuple[Literal["eager", "sdpa", "flash_attention_2"], ...] = ("sdpa", "eager")
    temperatures: tuple[Annotated[float, Field(gt=0, le=2)], ...] = (0.6, 1.0, 1.3)
    prompts: int = 16
    tokens: int = 48
    """Sampled per answer, at most."""


@dataclass(frozen=True)
class Sampled:
    """One answer of an engine."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    temperature: float
    routed_experts: str
    together: bool
    """Made beside all the others, not alone."""


class Alignment(BaseModel):
    """One setting over all its tokens: distances in nats, mismatch_kl by the k3 estimate. The worst case is the largest
    mean over temperatures and compositions of batches."""

    engine_dtype: str
    trainer_dtype: str
    attention: str
    routing: Literal["", "replayed", "own"] = ""
    """Of a mixture of experts: whose experts the trainer took, the engine's or its own."""
    tokens: int
    mismatch_kl: float
    mismatch_kl_worst: float
    worst: str
    mismatch_kl_max: float
    mismatch_abs: float
    mismatch_abs_max: float
    far_share: float

    @property
    def possible(self) -> bool:
        """Whether run.json can say it: engine and trainer have one dtype there."""
        return self.engine_dtype == self.trainer_dtype


class Aligned(BaseModel):
    """All settings, best first among those that run.json can say."""

    model: str
    rows: list[Alignment]
    recommended: dict[str, str | bool]
    """Fields of run.json's `training`."""
    good: bool
    """Whether the recommended setting is below the default of training.max_mismatch_kl in its worst case."""


def align(model: Path, options: Options, say: Say) -> Aligned:
    """Compare all settings. Raises InvalidConfig for a folder that is no model, EngineError, TrainerError."""
    rows: list[Alignment] = []
    for dtype in options.dtypes:
        say(f"an engine in {dtype} samples")
        sampled = asyncio.run(_sample(model, dtype, options))
        for trainer_dtype, attention in product(options.dtypes, options.attention):
            say(f"a trainer in {trainer_dtype} with {attention} scores {len(sampled)} answers of {dtype}")
            rows += compare(model, sampled, dtype, trainer_dtype, attention)
    # Through the engine's experts is never worse but for rounding, which would decide between equals.
    rows.sort(key=lambda row: (not row.possible, row.routing == "own", row.mismatch_kl_worst))
    best = rows[0]
    return Aligned(
        model=str(model),
        rows=rows,
        recommended={"dtype": best.trainer_dtype, "attention": best.attention}
        | ({"replay_routing": best.routing == "replayed"} if best.routing else {}),
        good=best.possible and best.mismatch_kl_worst <= TrainingConfig().max_mismatch_kl,
    )


# --- the engine ---------------------------------------------------------------------------------------------------


async def _sample(model: Path, dtype: str, options: Options) -> list[Sampled]:
    template, taskset = Template.load(str(model)), ShellTaskset()
    ids = taskset.ids(Split.TRAIN)[: options.prompts]
    prompts = [template.initial(initial_messages(taskset.load(task_id))) for task_id in ids]
    context = max(map(len, prompts)) + options.tokens
    async with _engine(model, dtype, context) as client:

        async def answer(number: int, temperature: float, together: bool) -> Sampled:
            made = await client.generate(
                prompts[number],
                temperature=temperature,
                max_tokens=options.tokens,
                seed=number,
                stop_token_ids=[template.end_of_turn],
                routed_from=0 if routes_experts(str(model)) else None,
            )
            return Sampled(prompts[number], made.token_ids, made.logprobs, temperature, made.routed_experts, together)

        # What an engine tells of experts may begin with the second request.
        await answer(0, 1.0, False)
        found: list[Sampled] = []
        for temperature in options.temperatures:
            found += [await answer(number, temperature, False) for number in range(len(prompts))]
            found += await asyncio.gather(*(answer(number, temperature, True) for number in range(len(prompts))))
        return found


@asynccontextmanager
async def _engine(model: Path, dtype: str, context_length: int) -> AsyncIterator[EngineClient]:
    """A server of its own, in a folder of its own, which ends with the block."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="ratchet-align-") as folder:
        home = Path(folder)
        (home / "logs").mkdir()
        with (home / "logs" / f"{ENGINE}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.engine", "--name", ENGINE, "--port", str(port)],
                env=os.environ | {"RATCHET_HOME": folder},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        client = EngineClient(EngineInfo(name=ENGINE, host="local", url=f"http://{LOOPBACK}:{port}"))
        try:
            spec = EngineSpec.of(str(model), context_length=context_length, dtype=dtype)
            await _while_it_lives(process, serve(client, spec, home, wait_s=START_S), home)
            yield client
        finally:
            await client.close()
            process.kill()
            process.wait()
            shutil.rmtree(scratch_root(home), ignore_errors=True)


async def _while_it_lives(process: subprocess.Popen[bytes], starting: Awaitable[object], home: Path) -> None:
    """Wait for the start. Raises EngineError with the errors of the engine's log as soon as the process has ended:
    nobody starts it again."""
    task = asyncio.ensure_future(starting)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=LOOK_EVERY_S)
            if not task.done() and (code := process.poll()) is not None:
                raise EngineError(f"the engine ended with code {code}: {last_words(home, ENGINE)}", retryable=False)
        await task
    finally:
        task.cancel()


# --- the trainer --------------------------------------------------------------------------------------------------


def compare(
    model: Path, sampled: Sequence[Sampled], engine_dtype: str, trainer_dtype: str, attention: str
) -> list[Alignment]:
    """One line; of a mixture of experts one for each way to choose them."""
    import torch

    from activities.training.engine import Trainer

    training = TrainingConfig.model_validate({"dtype": trainer_dtype, "attention": attention})
    trainer = Trainer(model, training, seed=0)
    ways = ("replayed", "own") if any(one.routed_experts for one in sampled) else ("",)
    cases: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {way: {} for way in ways}
    try:
        for way, (name, items, parts) in product(ways, _cases(sampled)):
            if way == "own":
                items = [replace(item, experts=None) for item in items]
            policy = torch.cat([_scored(trainer, items, rows) for rows in parts])
            order = [row for rows in parts for row in rows]
            behaviour = np.concatenate([items[row].logprobs[items[row].loss_mask] for row in order])
            cases[way][name] = policy, torch.from_numpy(behaviour)
    finally:
        trainer.close()
    setting = {"engine_dtype": engine_dtype, "trainer_dtype": trainer_dtype, "attention": attention}
    return [_alignment(found, setting | {"routing": way}) for way, found in cases.items()]


def _alignment(cases: Mapping[str, tuple[torch.Tensor, torch.Tensor]], setting: Mapping[str, str]) -> Alignment:
    import torch

    from activities.training.agreement import mismatch_metrics

    found = {name: mismatch_metrics(*pair) for name, pair in cases.items()}
    worst = max(found, key=lambda name: found[name]["mismatch_kl/mean"])
    whole = mismatch_metrics(*(torch.cat(side) for side in zip(*cases.values(), strict=True)))
    figures = {
        "tokens": sum(len(policy) for policy, _ in cases.values()),
        "mismatch_kl": whole["mismatch_kl/mean"],
        "mismatch_kl_worst": found[worst]["mismatch_kl/mean"],
        "worst": worst,
        "mismatch_kl_max": whole["mismatch_kl/max"],
        "mismatch_abs": whole["mismatch_abs/mean"],
        "mismatch_abs_max": whole["mismatch_abs/max"],
        "far_share": whole["mismatch_abs/far_share"],
    }
    return Alignment.model_validate({**setting, **figures})


def _cases(sampled: Sequence[Sampled]) -> Iterator[tuple[str, list[Trajectory], list[list[int]]]]:
    """Each temperature and composition of the engine's batch, scored row by row and in one padded batch."""
    for temperature, together in dict.fromkeys((one.temperature, one.together) for one in sampled):
        items = [_trajectory(one) for one in sampled if (one.temperature, one.together) == (temperature, together)]
        made = "together" if together else "alone"
        for scored, parts in (
            ("alone", [[row] for row in range(len(items))]),
            ("together", [list(range(len(items)))]),
        ):
            yield f"temperature {temperature:g}, made {made}, scored {scored}", items, parts


def _trajectory(one: Sampled) -> Trajectory:
    from activities.training.batch import Trajectory, decoded_experts

    length, prompt = len(one.prompt) + len(one.token_ids), len(one.prompt)
    mask = np.zeros(length, np.bool_)
    mask[prompt:] = True
    logprobs = np.zeros(length)
    logprobs[prompt:] = one.logprobs
    return Trajectory(
        attempt_id="",
        group_id="",
        reward=0.0,
        token_ids=np.array(one.prompt + one.token_ids, np.int64),
        loss_mask=mask,
        logprobs=logprobs,
        temperatures=np.full(length, one.temperature),
        versions=np.where(mask, 0, -1),
        experts=decoded_experts("align", [one.routed_experts], length),
    )


def _scored(trainer: Trainer, items: list[Trajectory], rows: list[int]) -> torch.Tensor:
    import torch

    from activities.training.batch import pad

    with torch.no_grad():
        logprobs_N, _ = trainer.logprobs(pad(items, rows, trainer.device))
    return logprobs_N.cpu()
