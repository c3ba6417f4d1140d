"""Weights that the trainer's machine offers, and the thread that brings them into an engine's memory."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from activities.generation.answers import Checksums
from activities.generation.proof import compared
from activities.generation.staging import Staging
from activities.publication.checksums import Received, checksum, checksums_of_model, remember
from activities.publication.manifest import TensorInfo
from activities.publication.offers import Offers, OfferServer
from workflows.errors import StorageError

TENSORS = {
    "embed": torch.arange(12, dtype=torch.float32).view(3, 4),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "steps": torch.tensor(7),
    "none": torch.empty(0, 3),
}


@pytest.fixture
def offered(tmp_path: Path) -> tuple[Offers, str, int]:
    """(offers, sha256, bytes) of TENSORS."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    offers, digest = Offers(tmp_path / "offers"), hashlib.sha256(data).hexdigest()
    offers.put(tmp_path / "model.safetensors", digest)
    return offers, digest, len(data)


@pytest.fixture(params=["unix", "tcp", "file"])
def source(offered: tuple[Offers, str, int], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    offers, digest, _ = offered
    if request.param == "file":
        yield f"file:{offers.path(digest)}"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"unix:{tmp_path / 's'}" if request.param == "unix" else f"http://127.0.0.1:{port}"
    with OfferServer(address, offers):
        yield address


def staged(source: str, digest: str, size: int, **options: float) -> Staging:
    staging = Staging(source, digest, size, **options)
    staging.wait()
    return staging


def test_what_is_offered_arrives_tensor_by_tensor(offered: tuple[Offers, str, int], source: str) -> None:
    _, digest, size = offered
    staging = staged(source, digest, size)
    assert (staging.ready, staging.failed) == (True, "")
    arrived = dict(staging.tensors())
    assert arrived.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert arrived[name].dtype == tensor.dtype and torch.equal(arrived[name], tensor)


def test_a_rate_does_not_change_what_arrives(offered: tuple[Offers, str, int], source: str) -> None:
    _, digest, size = offered
    assert staged(source, digest, size, bytes_per_s=100 * size).ready


def test_a_byte_that_changes_in_the_staged_memory_shows_in_the_checksums_of_what_the_model_was_given(
    offered: tuple[Offers, str, int], source: str
) -> None:
    _, digest, size = offered
    published = [
        TensorInfo(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype), checksum=checksum(tensor))
        for name, tensor in TENSORS.items()
    ]
    for changed, faults in (
        (False, ""),
        (True, "the manifest has other checksums: half as the engine was given it"),
    ):
        staging, received = staged(source, digest, size), Received()
        if changed:
            dict(staging.tensors())["half"].view(torch.uint8)[3] ^= 0x10
        model = torch.nn.Linear(1, 1)
        taken = dict(received.passing(staging.tensors()))
        staging.drop()
        remember(model, received)
        del taken
        given, held = checksums_of_model(model)
        assert compared(published, Checksums(given, held))[1] == faults


def test_one_changed_byte_is_refused(offered: tuple[Offers, str, int], source: str) -> None:
    offers, digest, size = offered
    data = bytearray(offers.path(digest).read_bytes())
    data[-1] ^= 1
    offers.path(digest).write_bytes(data)
    staging = staged(source, digest, size)
    assert not staging.ready
    assert f"not {size} of {digest[:12]}" in staging.failed


@pytest.mark.parametrize("change", [-1, 1])
def test_another_length_is_refused(offered: tuple[Offers, str, int], source: str, change: int) -> None:
    _, digest, size = offered
    staging = staged(source, digest, size + change)
    assert not staging.ready and staging.failed


def test_an_offer_cut_short_is_refused(offered: tuple[Offers, str, int], source: str) -> None:
    offers, digest, size = offered
    offers.path(digest).write_bytes(offers.path(digest).read_bytes()[:-8])
    assert not staged(source, digest, size).ready


def test_what_is_not_offered_is_said(offered: tuple[Offers, str, int], source: str) -> None:
    offers, digest, size = offered
    offers.path(digest).unlink()
    staging = staged(source, digest, size)
    assert not staging.ready
    assert "404 not offered here" in staging.failed or "FileNotFoundError" in staging.failed


def test_a_trainer_that_is_not_there_is_said(offered: tuple[Offers, str, int], tmp_path: Path) -> None:
    _, digest, size = offered
    assert "FileNotFoundError" in staged(f"unix:{tmp_path / 'nobody'}", digest, size).failed


def test_what_nobody_wants_any_more_is_never_ready(offered: tuple[Offers, str, int], source: str) -> None:
    _, digest, size = offered
    staging = Staging(source, digest, size)
    staging.drop()
    staging.wait()
    assert not staging.ready


def test_no_path_but_a_digest_is_answered(offered: tuple[Offers, str, int], tmp_path: Path) -> None:
    offers, digest, size = offered
    (tmp_path / "secret").write_bytes(b"x" * size)
    with OfferServer(f"unix:{tmp_path / 's'}", offers):
        for path in ("../secret", "%2e%2e/secret", digest.upper(), ""):
            assert "404" in staged(f"unix:{tmp_path / 's'}", path, size).failed


def test_the_newest_offers_stay(offered: tuple[Offers, str, int], tmp_path: Path) -> None:
    offers = offered[0]
    for name in ("a" * 64, "b" * 64):
        (tmp_path / name).write_bytes(b"")
        offers.put(tmp_path / name, name)
    offers.keep_last(2)
    assert {path.name for path in offers.folder.iterdir()} == {"a" * 64, "b" * 64}


def test_a_server_takes_the_place_of_one_that_was_killed(offered: tuple[Offers, str, int], tmp_path: Path) -> None:
    offers, digest, size = offered
    (tmp_path / "s").touch()
    with OfferServer(f"unix:{tmp_path / 's'}", offers):
        assert staged(f"unix:{tmp_path / 's'}", digest, size).ready
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("address", ["http://127.0.0.1:x", "http://256.0.0.1:80", "unix:/proc/none/s"])
def test_an_address_that_cannot_be_had_is_named(offered: tuple[Offers, str, int], address: str) -> None:
    with pytest.raises(StorageError, match="can't be offered at") as caught:
        OfferServer(address, offered[0])
    assert not caught.value.retryable


def test_only_its_owner_reaches_the_socket(offered: tuple[Offers, str, int], tmp_path: Path) -> None:
    with OfferServer(f"unix:{tmp_path / 's'}", offered[0]):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
