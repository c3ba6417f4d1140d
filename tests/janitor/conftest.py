from tests.sandbox.conftest import docker_host
from tests.workflows.conftest import temporal

__all__ = ["docker_host", "temporal"]
