"""The only listener of a deployment that other machines can reach: TLS, and only the SuperLink's node routes.

Flower's SuperLink serves nodes (fleet), users who start runs (control) and running apps (runtime) on one address, and
its control routes need no account. So the SuperLink stays on loopback, and this forwards the routes below, compared
byte by byte. The forwarded request is built anew: its path is one of these constants, never the requested text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

log = logging.getLogger("consilience.flower")

SMALL = 1 << 16  # bytes of a request without arrays
LARGE = 256 << 20  # of one with arrays: they come in chunks of 5 MiB, a secure sum's vector in one piece
ROUTES: dict[bytes, int] = {
    **dict.fromkeys((b"/v1/fleet/activate-node", b"/v1/fleet/deactivate-node"), SMALL),
    **dict.fromkeys((b"/v1/fleet/send-node-heartbeat", b"/v1/fleet/pull-messages"), SMALL),
    **dict.fromkeys((b"/v1/fleet/get-run", b"/v1/fleet/get-fab", b"/v1/fleet/pull-object"), SMALL),
    b"/v1/fleet/confirm-message-received": SMALL,
    **dict.fromkeys((b"/v1/fleet/push-messages", b"/v1/fleet/push-object"), LARGE),
}
"""The routes that a node with a registered key needs, with the largest body; without (un)register-node."""
TOGETHER = 1 << 30  # bytes of all requests that are being read or answered
ARRIVAL = 300.0  # seconds for a request to arrive
ANSWER = 60.0  # seconds for the SuperLink to answer
CONNECTIONS = 1024  # at a time
IDLE = 75  # seconds that a connection stays open between two requests: a handshake costs more than many requests
PASSED_ON = (
    *(b"content-type", b"accept", b"flwr-public-key", b"flwr-signature", b"flwr-timestamp"),
    *(b"flwr-package-name", b"flwr-package-version", b"flwr-component-name"),
)
PASSED_BACK = ("content-type",)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequestRefused(Exception):
    """A request that is not forwarded, with the status code of the answer."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def admit(scope: Scope) -> tuple[str, dict[str, str], int]:
    """(path, headers, largest body) of a request that may pass; `RequestRefused` for every other."""
    path = scope.get("raw_path", b"")
    if scope.get("method") != "POST" or path not in ROUTES or scope.get("query_string"):
        raise RequestRefused(404)
    headers: dict[str, str] = {}
    for name, value in scope.get("headers", ()):
        if name.lower() in PASSED_ON:
            if name.lower().decode() in headers:
                raise RequestRefused(400)  # a header given twice is ambiguous
            headers[name.lower().decode()] = value.decode("latin-1")
    return path.decode(), headers, ROUTES[path]


class Gateway:
    """An ASGI app that forwards nodes' requests to the SuperLink at `superlink`, an `https://127.0.0.1:port`."""

    def __init__(self, client: Any, superlink: str) -> None:
        self._client, self._superlink, self._held = client, superlink.rstrip("/"), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # websockets; the lifespan is off
            raise RuntimeError(f"{scope['type']} is not served here")
        from starlette.responses import Response

        try:
            found = await self._answer(scope, receive)
        except RequestRefused as refused:
            found = Response(status_code=refused.code, headers={"connection": "close"})
        await found(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Any:
        import httpx
        from starlette.responses import Response

        path, headers, most = admit(scope)
        body = bytearray()
        try:
            await self._read(receive, body, most)
            found = await self._client.post(self._superlink + path, content=bytes(body), headers=headers)
        except TimeoutError:
            raise RequestRefused(408) from None
        except httpx.HTTPError as problem:
            log.warning("the SuperLink does not answer: %r", problem)
            raise RequestRefused(503) from None  # Flower's nodes try again
        finally:
            self._held -= len(body)
        kept = {name: value for name, value in found.headers.items() if name in PASSED_BACK or name.startswith("flwr-")}
        return Response(found.content, status_code=found.status_code, headers=kept)

    async def _read(self, receive: Receive, body: bytearray, most: int) -> None:
        """The request's body into `body`; every byte of it is counted in `_held`."""
        async with asyncio.timeout(ARRIVAL):
            more = True
            while more:
                part = await receive()
                if part["type"] == "http.disconnect":
                    raise RequestRefused(400)
                content = part.get("body", b"")
                if len(body) + len(content) > most:
                    raise RequestRefused(413)
                if self._held + len(content) > TOGETHER:
                    raise RequestRefused(503)
                self._held += len(content)
                body += content
                more = part.get("more_body", False)


def listener(app: Gateway, host: str, port: int, **tls: str) -> Any:
    """The HTTP server of the gateway: HTTP/1.1 by a strict parser, no websockets, no server header."""
    import uvicorn

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http="h11",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=IDLE,
        **tls,  # type: ignore[arg-type]
    )
    return uvicorn.Server(config)


async def serve(host: str, port: int, superlink: str, authority: str, certificate: str, key: str) -> None:
    """Listen until a signal comes."""
    import ssl

    import httpx

    trust = ssl.create_default_context(cafile=authority)
    many = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(verify=trust, timeout=ANSWER, trust_env=False, limits=many) as client:
        gateway = Gateway(client, superlink)
        await listener(gateway, host, port, ssl_certfile=certificate, ssl_keyfile=key).serve()


def main() -> None:
    """`python -m consilience.flower.deploy.gateway`, which `consilience deploy link` starts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("--host", "--port", "--superlink", "--authority", "--certificate", "--key"):
        parser.add_argument(name, required=True, type=int if name == "--port" else str)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
