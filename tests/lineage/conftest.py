from tests.storage.conftest import make_run

__all__ = ["make_run"]
