"""What a request says of itself to whoever places it: our own routing, or a router between us and the engines."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote


class Affinity(NamedTuple):
    """What a request has in common with others, for whoever stands between us and the engine."""

    session: str
    """The episode: its later turns begin with this one's tokens."""
    prefix: str
    """What the prompt is made of: siblings share it."""

    @property
    def headers(self) -> dict[str, str]:
        """`X-Session-ID` is what a router is told to hash (vLLM's router and production stack, Envoy, Caddy), the next
        what SGLang's gateway hashes by itself; the last keeps siblings together where a router is told to hash it."""
        session, prefix = quote(self.session), quote(self.prefix)
        return {"X-Session-ID": session, "X-SMG-Routing-Key": session, "X-Ratchet-Prefix": prefix}
