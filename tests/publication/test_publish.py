"""Publication against a real store, database and trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sqlmodel import select

from activities.publication import activities as publication_activities
from activities.publication.export import check_tensors
from activities.publication.manifest import (
    Manifest,
    ManifestFile,
    TensorInfo,
    download_files,
    read_manifest,
    write_manifest,
)
from activities.training import transit
from storage.database import session
from storage.objects import MissingObject, ObjectStore
from storage.tables import Batch, EngineLoad, PolicyVersion, Publication
from tests.publication.stub import Policy, Published
from tests.training.worlds import VOCABULARY, World, Worlds
from workflows.contracts import PublishOutput
from workflows.errors import InvalidConfig, StorageError, TrainerError


async def step(run: World, number: int) -> PublishOutput:
    """Update `number` and its publication; 0: the start."""
    if number == 0:
        return await run.publish(0, (await run.start()).checkpoint)
    run.reserve(number)
    return await run.publish(number, (await run.update(number)).checkpoint)


def downloaded(run: World, key: str, folder: Path) -> Path:
    download_files(run.store, read_manifest(run.store, key), folder, progress=lambda _: None)
    return folder


async def test_what_is_published_is_a_model_that_gives_the_canarys_logprobs(world: Worlds, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = world()
    await step(run, 0)
    output = await step(run, 1)
    manifest = read_manifest(run.store, output.manifest)
    folder = downloaded(run, output.manifest, tmp_path / "weights")
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights, "tied weights are there once"
    assert {item.name: item.shape for item in manifest.tensors} == {
        name: list(value.shape) for name, value in weights.items()
    }
    assert manifest.canary is not None
    ids = manifest.canary.token_ids
    assert len(ids) <= 64 and max(ids) < VOCABULARY - 3, "ids of the tokenizer, which is smaller than the model's table"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [0.0] + [float(table[index - 1, token]) for index, token in enumerate(ids) if index]
    assert manifest.canary.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("training", "dtype"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, torch.float32),
        ({"deepspeed": {"zero_optimization": {"stage": 0}}}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"lora_rank": 4, "deepspeed": {"zero_optimization": {"stage": 3}}}, torch.float32),
        ({"lora_rank": 4, "dtype": "bfloat16"}, torch.bfloat16),
    ],
)
async def test_every_arrangement_of_the_trainer_exports_whole_tensors_and_comes_back(
    world: Worlds, tmp_path: Path, training: dict[str, object], dtype: torch.dtype
) -> None:
    run = world(**training)
    first = downloaded(run, (await step(run, 0)).manifest, tmp_path / "v0")
    source = load_file(run.policy / "model.safetensors")
    start = load_file(first / "model.safetensors")
    assert all(torch.equal(start[name], source[name].to(dtype)) for name in start)
    run.reserve(1)
    checkpoint = (await run.update(1)).checkpoint
    second = downloaded(run, (await run.restarted().publish(1, checkpoint)).manifest, tmp_path / "v1")
    changed = load_file(second / "model.safetensors")
    assert any(not torch.equal(start[name], changed[name]) for name in start)
    assert json.loads((second / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


async def test_an_adapter_is_published_beside_the_whole_weights_that_it_makes(world: Worlds, tmp_path: Path) -> None:
    """Loaded by PEFT on the model as it was, it gives the logits of what engines load."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = world(lora_rank=4, lora_alpha=12, lora_targets=["q_proj", "up_proj"], activation_checkpointing=True)
    await run.start()
    run.reserve(1)
    checkpoint = (await run.update(1)).checkpoint
    folder = downloaded(run, (await run.publish(1, checkpoint)).manifest, tmp_path / "v1")
    source, served = load_file(run.policy / "model.safetensors"), load_file(folder / "model.safetensors")
    changed = {name for name in served if not torch.equal(source[name], served[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "up_proj"}
    plain = AutoModelForCausalLM.from_pretrained(run.policy)
    with_adapter = PeftModel.from_pretrained(plain, folder / "adapter").eval()
    ids = torch.arange(20)[None, :]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
        assert torch.allclose(with_adapter(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("layer", ["query", "embed_tokens", "lm_head"])
async def test_layers_that_can_have_no_adapter_are_named_with_those_that_can(world: Worlds, layer: str) -> None:
    """One that the model lacks, one that is no linear layer, one whose weight the embedding shares."""
    with pytest.raises(InvalidConfig) as caught:
        await world(lora_rank=4, lora_targets=[layer]).start()
    said, _, able = str(caught.value).rpartition(": ")
    assert said.startswith("training.lora_targets") and layer in said
    assert able == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


async def test_each_version_has_another_canary_and_shares_the_files_that_do_not_change(world: Worlds) -> None:
    run = world()
    manifests = [read_manifest(run.store, (await step(run, number)).manifest) for number in (0, 1)]
    canaries = [item.canary for item in manifests]
    assert canaries[0] is not None and canaries[1] is not None
    assert canaries[0].token_ids == canaries[1].token_ids
    gaps = [abs(one - other) for one, other in zip(canaries[0].logprobs, canaries[1].logprobs, strict=True)]
    assert max(gaps) > 1e-3
    keys = [{file.name: file.key for file in item.files} for item in manifests]
    assert keys[0]["tokenizer.json"] == keys[1]["tokenizer.json"]
    assert keys[0]["model.safetensors"] != keys[1]["model.safetensors"]


async def test_publishing_again_answers_the_same_and_writes_nothing(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world()
    await step(run, 0)
    first = await step(run, 1)
    with session(run.database) as opened:
        batch = opened.get(Batch, f"{run.run}/b1")
        assert batch is not None and batch.state == "published"
    for name in ("put", "put_file"):
        monkeypatch.setattr(run.store, name, lambda *_, **__: pytest.fail("wrote again"))
    with session(run.database) as opened:
        version = opened.get(PolicyVersion, (run.run, 1))
    assert version is not None
    assert await run.publish(1, version.checkpoint) == first
    assert (version.step, version.batch) == (1, f"{run.run}/b1")


async def test_a_new_worker_publishes_the_same_content_from_the_checkpoint(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies after the manifest and before the rows; the repetition is the same manifest, to the digest."""
    run = world()
    await step(run, 0)
    run.reserve(1)
    checkpoint = (await run.update(1)).checkpoint

    def die(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(run.publishes, "_record", die)
        with pytest.raises(RuntimeError, match="killed"):
            await run.publish(1, checkpoint)
    before = read_manifest(run.store, f"runs/{run.run}/weights/v000001/manifest.json")
    output = await run.restarted().publish(1, checkpoint)
    assert output.digest == before.digest
    with session(run.database) as opened:
        assert len(opened.exec(select(Publication).where(Publication.version == 1)).all()) == 1
    assert not any((run.folder / "spool/trainer").iterdir())


async def test_a_death_within_the_upload_leaves_no_manifest_and_no_row(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world()
    await step(run, 0)
    run.reserve(1)
    checkpoint = (await run.update(1)).checkpoint

    def lost(*_: object, **__: object) -> None:
        raise StorageError("connection lost")

    with monkeypatch.context() as patched:
        patched.setattr(run.store, "put_file", lost)
        with pytest.raises(StorageError):
            await run.publish(1, checkpoint)
    with pytest.raises(MissingObject):
        read_manifest(run.store, f"runs/{run.run}/weights/v000001/manifest.json")
    with session(run.database) as opened:
        assert opened.get(Publication, (run.run, 1)) is None
    assert not any((run.folder / "spool/trainer").iterdir())
    assert (await run.publish(1, checkpoint)).version == 1


def test_a_manifest_is_not_written_before_all_it_names_is_there(s3: ObjectStore) -> None:
    s3.put("half/a", b"12345")
    file = ManifestFile(name="a", key="half/a", bytes=5, sha256="")
    for wrong in (file.model_copy(update={"key": "half/b"}), file.model_copy(update={"bytes": 6})):
        manifest = Manifest(kind="weights", run="r", version=0, step=0, files=[file, wrong])
        with pytest.raises(StorageError, match="is not in the store"):
            write_manifest(s3, "half/manifest.json", manifest)
    assert not s3.exists("half/manifest.json")


def test_an_object_that_was_damaged_is_refused_on_read(s3: ObjectStore, tmp_path: Path) -> None:
    s3.put("damaged/a", b"12345")
    manifest = Manifest(
        kind="weights",
        run="r",
        version=0,
        step=0,
        files=[ManifestFile(name="a", key="damaged/a", bytes=5, sha256="0" * 64)],
    )
    with pytest.raises(StorageError, match="sha256 differs"):
        download_files(s3, manifest, tmp_path, progress=lambda _: None)
    assert not any(tmp_path.iterdir())


def test_wrong_tensors_are_refused_by_name_shape_dtype_and_value() -> None:
    expected = [TensorInfo(name=name, shape=[2], dtype="float32") for name in "abcde"]
    weights = {
        "a": torch.zeros(2),
        "b": torch.zeros(0),
        "c": torch.zeros(2, dtype=torch.float16),
        "d": torch.tensor([0.0, math.inf]),
        "x": torch.zeros(2),
    }
    with pytest.raises(TrainerError) as caught:
        check_tensors(weights, expected)
    for fault in ("e is missing", "x is not the model's", "b has shape [0]", "c is torch.float16", "d has values"):
        assert fault in str(caught.value)


async def test_old_versions_go_once_a_newer_one_is_published(world: Worlds) -> None:
    run = world()
    run.keep_last = 2
    for number in range(4):
        await step(run, number)
        with session(run.database) as opened:
            opened.add(EngineLoad(run=run.run, version=number, engine="local-e0", proven=True, loaded_at=float(number)))
    assert manifests(run) == {"weights/v000002", "weights/v000003", "state/s000002", "state/s000003"}
    referred = set()
    for kind, name in (item.split("/") for item in manifests(run)):
        found = [key for key, _ in run.store.keys(f"runs/{run.run}/{kind}/{name}/")]
        referred |= {file.key for key in found for file in read_manifest(run.store, key).files}
    assert {key for key, _ in run.store.keys(f"runs/{run.run}/objects/")} == referred


async def test_weights_that_an_engine_serves_stay(published: Callable[..., Published]) -> None:
    run, policy = published(keep_last=1), Policy(1000)
    for version in (0, 1):
        await run.publish(version, policy.tensors())
    run.loaded(1)
    run.loaded(2, proven=False)
    for version in (2, 3):
        await run.publish(version, policy.tensors())
    assert run.versions() == {1, 2, 3}


async def test_what_killed_tries_left_is_swept_but_not_while_a_later_batch_is_reserved(world: Worlds) -> None:
    run = world()
    await step(run, 0)
    run.store.put(f"runs/{run.run}/objects/{'0' * 64}", b"left by a killed try")
    run.reserve(1)
    run.reserve(2)
    await run.publish(1, (await run.update(1)).checkpoint)
    assert run.store.exists(f"runs/{run.run}/objects/{'0' * 64}")
    await run.publish(2, (await run.update(2)).checkpoint)
    assert not run.store.exists(f"runs/{run.run}/objects/{'0' * 64}")


def manifests(run: World) -> set[str]:
    """`<kind>/<version or step>` of every manifest of the run."""
    keys = [key for kind in ("weights", "state") for key, _ in run.store.keys(f"runs/{run.run}/{kind}/")]
    return {"/".join(key.split("/")[2:4]) for key in keys}


async def test_a_full_disk_is_noticed_before_the_write_with_the_numbers(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world()
    checkpoint = (await run.start()).checkpoint
    usage = type("Usage", (), {"free": 3_000_000})()
    monkeypatch.setattr(transit.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=r"68 MB are needed .* 3 MB are free") as caught:
        await run.publish(0, checkpoint)
    assert caught.value.retryable
    assert publication_activities.weights_key(run.run, 0) not in dict(run.store.keys(f"runs/{run.run}/weights"))
