"""All sandboxes together weigh more than what runs beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.sandbox.cgroup import PARENT, TIMES, raise_share, share
from activities.sandbox.docker import DockerBackend
from tests.sandbox.conftest import Box


@pytest.mark.docker
async def test_the_raised_weight_is_in_force_for_every_container(backend: DockerBackend, box: Box) -> None:
    if backend._containers._cgroup == "":
        pytest.skip("this daemon makes its groups itself")
    lines = Path(f"/proc/{await backend.pid(box.id)}/cgroup").read_text().splitlines()
    groups = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    ours = next(path for names, path in groups.items() if "cpu" in names.split(",") or names == "")
    assert Path(ours).parent == Path(PARENT)
    assert share(PARENT) == TIMES
    assert share(ours) == 1, "among themselves they are equal"


def test_the_weight_is_that_of_cgroup_v2_where_there_is_no_v1(tmp_path: Path) -> None:
    (tmp_path / "ratchet").mkdir()
    (tmp_path / "ratchet" / "cpu.weight").write_text("100\n")
    assert share("/ratchet", tmp_path) == 1
    raise_share("/ratchet", tmp_path)
    assert (tmp_path / "ratchet" / "cpu.weight").read_text() == "800"
    assert share("", tmp_path) is None
