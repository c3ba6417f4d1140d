from __future__ import annotations

from tests.publication.conftest import published

__all__ = ["published"]
