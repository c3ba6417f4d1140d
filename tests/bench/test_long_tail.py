from __future__ import annotations

import io
import math
import tarfile
from pathlib import Path

import pytest

from activities.sandbox.image import busybox_layer
from bench.long_tail import BUSY, NOT_READY, SLOW, TAIL, Tail, load_of, paced_layer, tasks, write_folder
from tasksets import open_taskset, pick
from tasksets.shell import ShellTaskset
from workflows.contracts import Split

IMAGE = f"sha256:{'0' * 64}"


def test_the_same_seed_gives_the_same_folder(tmp_path: Path) -> None:
    one, other = (write_folder(tmp_path / name, IMAGE, 7) for name in ("one", "other"))
    files = [path.relative_to(one) for path in sorted(one.rglob("*.json"))]
    assert len(files) == 320
    assert all((one / file).read_bytes() == (other / file).read_bytes() for file in files)
    third = write_folder(tmp_path / "third", IMAGE, 8)
    assert any((one / file).read_bytes() != (third / file).read_bytes() for file in files)


def test_a_run_takes_its_tasks_from_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, IMAGE, 0)
    taskset = open_taskset(str(folder))
    picked = pick(taskset, Split.TRAIN, 0, 0, 16)
    assert len({taskset.load(ref.task_id).kind for ref in picked}) == 8
    assert all(taskset.load(ref.task_id).image == IMAGE for ref in picked)


def test_shares_are_those_of_the_table() -> None:
    assert sum(share for share, _ in BUSY) == pytest.approx(1)
    loads = [load_of(f"count-{number:04d}", 0) for number in range(4000)]
    for share, value in BUSY:
        assert sum(load.busy == value for load in loads) / len(loads) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("tail", [TAIL, Tail(median_s=0.5, sigma=0.5)])
def test_paces_are_log_normal_over_the_tasks(tail: Tail) -> None:
    loads = [load_of(f"count-{number:04d}", 0, tail) for number in range(4000)]
    paces = sorted(load.pace_s for load in loads)
    assert paces[2000] == pytest.approx(tail.median_s, rel=0.1)
    assert paces[3365] == pytest.approx(tail.median_s * math.exp(tail.sigma), rel=0.1), "one standard deviation above"
    assert max(paces) <= tail.longest_s
    assert all(load.slow for load in loads if load.pace_s > SLOW * tail.median_s or load.busy)
    assert not any(load.slow for load in loads if load.pace_s <= SLOW * tail.median_s and not load.busy)


def test_only_the_environment_and_the_long_answers_differ_from_shell() -> None:
    shell = ShellTaskset()
    lengthened = 0
    for task in tasks(IMAGE, 0):
        plain, load = shell.load(task.id), load_of(task.id, 0)
        assert (task.instruction, task.oracle) == (plain.instruction, plain.oracle)
        assert f"echo {load.pace_s} > /data/.bench/pace" in task.setup
        assert ("/data/.bench/busy" in task.setup) == (load.busy > 0)
        if task.oracle_answer != plain.oracle_answer:
            lengthened += 1
            assert task.kind == "find"
            assert len(task.oracle_answer.split()) == 12
            assert f'"{task.oracle_answer}"' in task.check
            assert f"{task.oracle_observations[0]}\\n" in task.setup
        else:
            assert task.check == plain.check
            assert task.setup.startswith(plain.setup)
    assert lengthened > 10


def test_a_busy_shell_says_what_the_policy_goes_on_after() -> None:
    assert NOT_READY.startswith("Not understood: no action.")
    busy = next(task for task in tasks(IMAGE, 0) if load_of(task.id, 0).busy)
    assert NOT_READY in busy.setup


def test_the_image_differs_from_busybox_in_its_shell_alone() -> None:
    def content(tar: bytes) -> dict[str, bytes | str]:
        with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
            files = {member.name: opened.extractfile(member) for member in opened if member.isreg()}
            links: dict[str, bytes | str] = {member.name: member.linkname for member in opened if member.issym()}
            return links | {name: file.read() for name, file in files.items() if file is not None}

    plain, paced = content(busybox_layer().tar), content(paced_layer().tar)
    assert {name for name in plain if plain[name] != paced[name]} == {"bin/sh"}
    assert plain.keys() == paced.keys()
    assert paced_layer().tag == paced_layer().tag
