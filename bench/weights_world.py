"""What bench.weights measures on: a model of a size, a trainer that holds it, real engines under load, a real S3."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from activities.generation.engine import EngineClient
from activities.generation.server import EngineSpec
from activities.generation.serving import serve
from activities.training.engine import Trainer
from activities.training.work import Work
from bench.own_stack import free_ports
from storage.objects import ObjectStore
from workers.stack.state import scratch_root
from workflows.config import RunConfig
from workflows.contracts import EngineInfo
from workflows.errors import EngineError, StorageError

SHAPES = {0.5: (96, 2, 1000), 10.0: (320, 6, 4096), 135.0: (576, 30, 49152)}
"""Hidden size, layers and vocabulary by millions of parameters; the last is SmolLM2's."""
IN_FLIGHT = 8
CONTEXT = 1024
ANSWER = 256


def save_model(folder: Path, *, seed: int, size: float) -> None:
    """A random Qwen3 of `size` million parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, vocabulary = SHAPES[size]
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=1536 if size > 100 else 3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 192),
        head_dim=64,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


class Held:
    """In place of the trainer's service: a trainer that holds whatever state is asked for."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._trained = [item for item in trainer.module.parameters() if item.requires_grad]
        self._masters = [item.detach().float().clone() for item in self._trained]

    async def call(self, function: Callable[[Work], Any]) -> Any:
        return await asyncio.to_thread(function, Work())

    def at(self, checkpoint: str, config: RunConfig, work: Work) -> Trainer:
        return self.trainer

    def step(self, learning_rate: float) -> None:
        """What one step of Adam does at most: each weight by the learning rate, up or down, in float32."""
        with torch.no_grad():
            for parameter, master in zip(self._trained, self._masters, strict=True):
                master.add_(torch.empty_like(master).bernoulli_(0.5).mul_(2).sub_(1), alpha=learning_rate)
                parameter.copy_(master)


@dataclass
class Traffic:
    """Requests on every engine, always as many; what they have made and what was thrown away."""

    clients: list[EngineClient]
    vocabulary: int
    made: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        self._stop = asyncio.Event()
        players = [
            asyncio.create_task(self._play(client, 1000 * index + number))
            for index, client in enumerate(self.clients)
            for number in range(IN_FLIGHT)
        ]
        try:
            yield
        finally:
            self._stop.set()
            await asyncio.gather(*players)

    async def rate(self, seconds: float) -> float:
        """Tokens per second of all engines, measured for so long."""
        made = self.made
        await asyncio.sleep(seconds)
        return (self.made - made) / seconds

    async def _play(self, client: EngineClient, number: int) -> None:
        while not self._stop.is_set():
            number += IN_FLIGHT
            prompt, left = [(number + 7 * index) % self.vocabulary for index in range(64)], ANSWER
            while left > 0 and not self._stop.is_set():
                try:
                    answer = await client.generate(
                        prompt, temperature=1.0, max_tokens=min(left, 32), seed=number, stop_token_ids=[]
                    )
                except EngineError:
                    # Cut before its first token: nothing is lost, and nothing is made.
                    continue
                prompt, left = prompt + answer.token_ids, left - len(answer.token_ids)
                self.made += len(answer.token_ids)


@dataclass
class BenchEngine:
    """A real engine; `seconds` is what its start took, with its model's weights."""

    home: Path
    model: Path
    client: EngineClient
    seconds: float


@asynccontextmanager
async def engine(home: Path, model: Path, name: str, dtype: str) -> AsyncIterator[BenchEngine]:
    """Started by the launcher, as the supervisor does it; ended with the block."""
    (home / "logs").mkdir(parents=True)
    port = free_ports(0, 1)[-1]
    environment = os.environ | {"RATCHET_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    client = EngineClient(EngineInfo(name=name, host="local", url=f"http://127.0.0.1:{port}"))
    argv = [sys.executable, "-m", "workers.engine", "--name", name, "--port", str(port)]
    with (home / "logs" / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
    began = time.monotonic()
    try:
        await serve(client, EngineSpec.of(str(model), context_length=CONTEXT, dtype=dtype), home, wait_s=600)
        yield BenchEngine(home, model, client, time.monotonic() - began)
    finally:
        await client.close()
        process.kill()
        process.wait()
        shutil.rmtree(scratch_root(home), ignore_errors=True)


@contextmanager
def serving_s3(home: Path) -> Iterator[ObjectStore]:
    """A real S3 server on a folder of this machine."""
    address = f"127.0.0.1:{free_ports(0, 1)[-1]}"
    access, secret = secrets.token_hex(8), secrets.token_hex(16)
    (home / "s3" / "bench").mkdir(parents=True)
    argv = [str(Path(sys.executable).parent / "rclone"), "serve", "s3", "--addr", address]
    argv += ["--auth-key", f"{access},{secret}", str(home / "s3")]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store = ObjectStore.connect(
        endpoint=f"http://{address}", bucket="bench", region="us-east-1", access_key=access, secret_key=secret
    )
    try:
        while not _answers(store):
            time.sleep(0.1)
        yield store
    finally:
        server.terminate()
        server.wait()


def _answers(store: ObjectStore) -> bool:
    try:
        store.put("probe", b"")
    except StorageError:
        return False
    return True
