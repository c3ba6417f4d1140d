"""New weights on two engines under load: `python -m bench.weights [--sizes 0.5,10,135] [--rounds N] [--quick]`.

For each size of model, each channel and each plan for what is in flight: one optimizer step of Adam's size at the given
learning rate, the publication by the real activity, the load by the real loader on both engines at once, while eight
requests are always in flight on each. Printed beside a plain restart of an engine with the new weights, as people do
it. The last line is JSON; per size `pause_share` (median pause over publish latency, channel s3, full set),
`restart_over_pause`, `restart_over_slice`, `delta_share` and `adapter_share` (bytes of a delta, and of an adapter of
rank 16, over those of the full set, bfloat16).

- bytes: what was uploaded or handed out for the version.
- latency: from the end of the update to the last engine's proof; export, delta, upload, download, prepare, load, prove
  are its parts, the longest of the engines.
- pause: how long an engine made no token for the exchange, the longer of the two. slice: the longest that it made none
  while it made the weights ready before, between two of its steps.
- lost: sampled tokens that were thrown away. dip: how much slower the engines were while the version came to them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from temporalio.testing import ActivityEnvironment

from activities.generation.loader import EngineLoader, OfferSource
from activities.generation.weights import WeightsCache
from activities.publication.activities import PublicationActivities
from activities.publication.offers import FOLDER, UNIX, Offers, OfferServer
from activities.training.engine import Trainer
from bench.measure import finish, median_of, say, table
from bench.weights_world import SHAPES, BenchEngine, Held, Traffic, engine, save_model, serving_s3
from storage.database import open_database, session
from storage.migrations import migrate
from storage.objects import ObjectStore
from storage.tables import Run
from workflows.config import RunConfig, TrainingConfig
from workflows.contracts import ApplyInput, ApplyOutput, InFlight, PublishInput, PublishOutput
from workflows.errors import EngineError

SAMPLED = "vllm:generation_tokens_total"
TRIES = 4
PROBES = 2
"""Tokens that a load itself samples, for its proof."""
RATE_S = 2.0
"""For how long the engines' undisturbed pace is measured before each version."""
ADAPTER_RANK = 16
WAYS: dict[str, dict[str, Any]] = {
    "s3, full": {"weight_channel": "s3"},
    "s3, delta": {"weight_channel": "s3", "publication": {"full_every": 100}},
    "s3, adapter": {
        "weight_channel": "s3",
        "publication": {"full_every": 2},
        "training": {"lora_rank": ADAPTER_RANK},
    },
    "direct": {"weight_channel": "direct", "publication": {"store_every": 1000}},
    "colocated": {"weight_channel": "colocated", "mode": "sync", "publication": {"store_every": 1000}},
}
ENGINE_PARTS = ("download", "prepare", "drain", "load", "prove")
PARTS = ("export", "delta", "upload", "offer", *ENGINE_PARTS)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5,10,135", help="millions of parameters, of 0.5, 10 and 135")
    parser.add_argument("--rounds", type=int, default=3, help="versions per row, of which the medians are given")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--quick", action="store_true", help="one version of the smallest model per row")
    options = parser.parse_args(argv)
    if options.quick:
        options.sizes, options.rounds = "0.5", 1
    options.sizes = [float(size) for size in options.sizes.split(",")]
    if unknown := set(options.sizes) - SHAPES.keys():
        parser.error(f"--sizes: {unknown} not among {sorted(SHAPES)}")
    return options


@dataclass
class Bench:
    """Two engines that serve one model in one dtype, with the trainer of it and a store."""

    size: float
    dtype: str
    home: Path
    store: ObjectStore
    engines: list[BenchEngine]
    options: argparse.Namespace
    runs: int = 0

    def __post_init__(self) -> None:
        migrate(f"sqlite:///{self.home / 'rows.db'}")
        self.database = open_database(f"sqlite:///{self.home / 'rows.db'}")
        self.held, self._rank = self._holding(0), 0
        self.offers = self.home / "spool" / FOLDER
        self.address = f"{UNIX}{self.home / 'o'}"

    def config(self, way: str) -> RunConfig:
        told = WAYS[way] | {"training": self._training() | WAYS[way].get("training", {})}
        return RunConfig.model_validate({"model": str(self.engines[0].model), **told})

    def _training(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "deepspeed": {"zero_optimization": {"stage": 1}}}

    def _holding(self, rank: int) -> Held:
        """A trainer of the model, or of an adapter of that rank."""
        training = TrainingConfig.model_validate(self._training() | {"lora_rank": rank})
        return Held(Trainer(self.engines[0].model, training, seed=0))

    async def row(self, way: str, in_flight: InFlight) -> dict[str, float]:
        """The medians of some versions over one way, under one plan."""
        config, traffic = self.config(way), Traffic([item.client for item in self.engines], SHAPES[self.size][2])
        if (rank := config.training.lora_rank) != self._rank:
            self.held.trainer.close()
            self.held, self._rank = self._holding(rank), rank
        self.runs += 1
        run, rounds = f"r{self.runs}", list[dict[str, float]]()
        with session(self.database) as opened:
            opened.add(Run(id=run, state="running", mode="sync", seed=0, started_at=time.time()))
        publication = PublicationActivities(self.held, self.store, self.database, self.home / "spool")  # type: ignore[arg-type]
        source = OfferSource(self.address, self.offers)
        loaders = [
            EngineLoader(
                item.client,
                self.store,
                WeightsCache(self.store, item.home / "weights"),
                self.database,
                item.home,
                source,
                hold_s=0.2,
            )
            for item in self.engines
        ]
        bring = partial(self._bring, publication, loaders, run, config, in_flight)
        # The first version has none before it, and the engines have none of this run.
        await bring(0)
        sampled = await _sampled(self.engines)
        async with traffic.flowing():
            for number in range(1, self.options.rounds + 1):
                self.held.step(self.options.learning_rate)
                before = await traffic.rate(RATE_S)
                made, began = traffic.made, time.monotonic()
                published, outs = await bring(number)
                latency = time.monotonic() - began
                during = (traffic.made - made) / latency
                offered = max((path.stat().st_size for path in self.offers.glob("*")), default=0)
                rounds.append(
                    {
                        "MB": (published.bytes or offered) / 1e6,
                        "latency": latency,
                        "pause": max(out.pause_s for out in outs),
                        "slice": max(out.slice_s for out in outs),
                        "dip": 1 - during / before if before else 0.0,
                        **{name: _part(name, published, outs) for name in PARTS},
                    }
                )
        probes = PROBES * len(self.engines) * self.options.rounds
        lost = await _sampled(self.engines) - sampled - traffic.made - probes
        found = median_of(rounds) | {"lost": lost}
        say(f"{self.size:g} M, {way}, {in_flight}: latency {found['latency']:.2f} s, pause {found['pause']:.3f} s")
        return found

    async def _bring(
        self,
        publication: PublicationActivities,
        loaders: list[EngineLoader],
        run: str,
        config: RunConfig,
        in_flight: InFlight,
        version: int,
    ) -> tuple[PublishOutput, list[ApplyOutput]]:
        asked = PublishInput(
            run=run, config=config.model_dump(mode="json"), version=version, step=version, checkpoint="held"
        )
        published: PublishOutput = await ActivityEnvironment().run(publication.publish, asked)
        message = ApplyInput(
            run=run,
            engine=self.engines[0].client.info,
            version=version,
            manifest=published.manifest,
            in_flight=in_flight,
        )
        outs = await asyncio.gather(
            *(_applied(loader, message.model_copy(update={"engine": loader.client.info})) for loader in loaders)
        )
        if why := [out.why for out in outs if out.why]:
            raise SystemExit(f"{run}: {why[0]}")
        return published, list(outs)


async def _applied(loader: EngineLoader, message: ApplyInput) -> ApplyOutput:
    """Tried again as the workflow tries it: a busy engine may answer too late."""
    for _ in range(TRIES - 1):
        try:
            return await loader.apply(message)
        except EngineError as error:
            say(f"{loader.client.info.name}: {error}; again")
            await asyncio.sleep(1.0)
    return await loader.apply(message)


async def _sampled(engines: Sequence[BenchEngine]) -> float:
    """Tokens that the engines say they have sampled."""
    async with httpx.AsyncClient() as http:
        pages = [(await http.get(f"{item.client.info.url}/metrics")).text for item in engines]
    lines = [line for page in pages for line in page.splitlines() if line.startswith(SAMPLED)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _part(name: str, published: PublishOutput, outs: list[ApplyOutput]) -> float:
    """Seconds of one part of the latency: of the slower engine where it is an engine's, else of the publication."""
    if name in ENGINE_PARTS:
        return max(out.seconds.get(name, 0.0) for out in outs)
    return published.seconds.get(name, 0.0)


async def measure(size: float, options: argparse.Namespace) -> tuple[list[Sequence[object]], dict[str, float]]:
    """Rows of the table and the ratios of one size."""
    rows, ratios = list[Sequence[object]](), dict[str, float]()
    for dtype, ways, plans in (
        ("float32", ("s3, full", "direct", "colocated"), tuple(InFlight)),
        ("bfloat16", ("s3, full", "s3, delta", "s3, adapter"), (InFlight.KEEP,)),
    ):
        with tempfile.TemporaryDirectory(prefix="ratchet-weights-") as name, serving_s3(Path(name)) as store:
            home = Path(name)
            save_model(home / "model", seed=0, size=size)
            async with AsyncExitStack() as stack:
                engines = [
                    await stack.enter_async_context(
                        engine(home / f"e{index}", home / "model", f"local-e{index}", dtype)
                    )
                    for index in range(2)
                ]
                bench = Bench(size, dtype, home, store, engines, options)
                with OfferServer(bench.address, Offers(bench.offers)):
                    found = {(way, plan): await bench.row(way, plan) for way in ways for plan in plans}
                bench.held.trainer.close()
                restart_s = median(item.seconds for item in engines)
        for (way, plan), figures in found.items():
            parts = [figures[part] for part in PARTS]
            label = f"{way}, {dtype}"
            rows.append((f"{size:g} M", label, plan, figures["MB"], figures["latency"], *parts, figures["slice"]))
            rows[-1] = (*rows[-1], figures["pause"], int(figures["lost"]), f"{figures['dip']:.0%}")
        nothing = ["-"] * (len(PARTS) + 1)
        rows.append((f"{size:g} M", f"restart, {dtype}", "-", "-", restart_s, *nothing, restart_s, "-", "-"))
        if dtype == "float32":
            full = [found["s3, full", plan] for plan in plans]
            ratios["pause_share"] = median(item["pause"] / item["latency"] for item in full)
            ratios["restart_over_pause"] = restart_s / median(item["pause"] for item in full)
            ratios["restart_over_slice"] = restart_s / max(1e-9, median(item["slice"] for item in full))
        else:
            full_mb = found["s3, full", InFlight.KEEP]["MB"]
            ratios["delta_share"] = found["s3, delta", InFlight.KEEP]["MB"] / full_mb
            ratios["adapter_share"] = found["s3, adapter", InFlight.KEEP]["MB"] / full_mb
    return rows, ratios


def main() -> None:
    options = arguments()
    rows, told = list[Sequence[object]](), dict[str, object]()
    for size in options.sizes:
        more, ratios = asyncio.run(measure(size, options))
        rows += more
        told |= {f"{name}_{size:g}m": round(value, 4) for name, value in ratios.items()}
    print(table(("model", "way", "in flight", "MB", "latency", *PARTS, "slice", "pause", "lost", "dip"), rows))
    finish(told)


if __name__ == "__main__":
    main()
