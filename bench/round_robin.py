"""`python -m bench.round_robin --port P URL URL ...`: a router that hands each request to the next engine in turn.

What stands in front of engines where nobody thought of their caches. Called by collection.py for the lever of routing.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import httpx
from aiohttp import web

READ_S = 480.0
SKIPPED = ("host", "content-length", "transfer-encoding", "connection")


class RoundRobin:
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = itertools.cycle(urls)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=READ_S, pool=None))

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def forward(self, request: web.Request) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in SKIPPED}
        url = next(self._urls) + str(request.rel_url)
        try:
            answer = await self._http.request(request.method, url, content=await request.read(), headers=headers)
        except httpx.HTTPError as error:
            return web.Response(status=502, text=f"{type(error).__name__}: {error}")
        kept = {name: value for name, value in answer.headers.items() if name.lower() == "content-type"}
        return web.Response(status=answer.status_code, body=answer.content, headers=kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("urls", nargs="+")
    options = parser.parse_args()
    web.run_app(
        RoundRobin(options.urls).application(), host="127.0.0.1", port=options.port, print=None, access_log=None
    )


if __name__ == "__main__":
    main()
