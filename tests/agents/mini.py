"""mini-swe-agent as it is published, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MINI = "mini-swe-agent==2.4.6"
MINI_ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_DOCKER_EXECUTABLE": "docker",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "MSWEA_SILENT_STARTUP": "1",
}


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of its command."""
    folder = tmp_path_factory.mktemp("mini")
    uv = [str(Path(sys.executable).with_name("uv"))]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), MINI]
    subprocess.run(install, check=True, timeout=500)
    return folder / "bin" / "mini"


def mini_command(mini: Path) -> str:
    """How it is started: with a short prompt of its own, acting through `docker exec`."""
    options = [
        "-c mini.yaml",
        "-c agent.system_template=shell",
        "-c 'agent.instance_template={{task}}'",
        "-c environment.image=x",
        "-c environment.cwd=/work",
        '-c \'environment.interpreter=["sh", "-c"]\'',
        "-c model.cost_tracking=ignore_errors",
    ]
    task = '-m openai/$RATCHET_MODEL -t "$RATCHET_INSTRUCTION" --environment-class docker'
    return f"{mini} -y --exit-immediately -l 0 {task} {' '.join(options)}"
