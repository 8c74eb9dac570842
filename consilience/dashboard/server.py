"""The dashboard as a process: Starlette finds the page, uvicorn speaks HTTP and TLS; who may ask is checked first."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilience.core.settings import Invalid
from consilience.dashboard.access import AccessRules
from consilience.dashboard.pages import Pages
from consilience.reporting.page import POLICY

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": f"{POLICY}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """Passes GET and HEAD on to the pages, and answers everything else itself."""

    def __init__(self, app: App, access: AccessRules) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # a web socket is closed unopened

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, guarded)
            return
        status, text, extra = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *extra]
        await guarded({"type": "http.response.start", "status": status, "headers": headers})
        await guarded({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else text.encode()})

    def _refusal(self, scope: Message) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """Status, text and headers of an answer that is no page; None lets the visitor in."""
        sent = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._access.accepts_host(sent.get(b"host", "")):
            return 421, "this dashboard is for this machine: use 127.0.0.1 or localhost\n", []
        if not self._access.authorises(sent.get(b"authorization", "")):
            challenge = b'Basic realm="consilience: any name, the token as password", charset="UTF-8"'
            return 401, "the token is needed\n", [(b"www-authenticate", challenge)]
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this dashboard only shows: GET and HEAD\n", [(b"allow", b"GET, HEAD")]
        return None


if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_MOST_AT_ONCE = 64  # connections; more are answered 503
_NEEDED = 'the dashboard needs starlette, uvicorn and matplotlib: pip install "consilience[dashboard]"'


def application(pages: Pages, access: AccessRules) -> App:
    """The pages behind the guard, as an ASGI application."""
    try:
        from starlette.applications import Starlette
        from starlette.responses import HTMLResponse, PlainTextResponse
        from starlette.routing import Route
    except ImportError as problem:
        raise ImportError(_NEEDED) from problem

    def index(request: Request) -> Response:
        return HTMLResponse(pages.index())

    def run(request: Request) -> Response:
        text = pages.run(request.path_params["name"].rstrip("/"))
        return PlainTextResponse("no such run\n", 404) if text is None else HTMLResponse(text)

    # plain functions: Starlette runs them in threads, so that drawing holds nobody else up
    routes = [Route("/", index, methods=["GET"]), Route("/runs/{name:path}", run, methods=["GET"])]
    return Guard(Starlette(routes=routes), access)  # type: ignore[arg-type,unused-ignore]


def serve(folder: Path, access: AccessRules, *, port: int, refresh: int, with_similarity: bool) -> None:
    """Serve until interrupted."""
    try:
        import matplotlib  # noqa: F401
        import uvicorn
    except ImportError as problem:
        raise ImportError(_NEEDED) from problem
    if not folder.is_dir():
        raise Invalid(f"{str(folder)!r} is no folder: name the one that holds the run folders (default: runs)")
    app = application(Pages(folder, refresh=refresh, with_similarity=with_similarity), access)
    _check_tls(access)
    listening = _listen(access.host, port)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type,unused-ignore]
        ssl_certfile=str(access.certificate) if access.certificate else None,
        ssl_keyfile=str(access.key) if access.key else None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        limit_concurrency=_MOST_AT_ONCE,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
    )
    name = f"[{access.host}]" if ":" in access.host else access.host
    print(f"{access.scheme}://{name}:{listening.getsockname()[1]}/  (read-only; Ctrl-C ends it)", flush=True)
    if not with_similarity:
        print("who resembles whom is not shown; --similarity shows it", file=sys.stderr, flush=True)
    with listening, contextlib.suppress(KeyboardInterrupt):  # how a dashboard ends
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()  # from here on visitors wait instead of being refused
    except OSError as problem:
        raise Invalid(f"cannot listen on {host} port {port}: {problem.strerror}; choose another --port") from problem
    return found


def _check_tls(access: AccessRules) -> None:
    """A certificate that cannot be used is refused here, not in the first visitor's face."""
    if access.certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(access.certificate, access.key)
    except (OSError, ssl.SSLError) as problem:
        raise Invalid(f"--certificate = {str(access.certificate)!r} and --key cannot be used: {problem}") from problem
