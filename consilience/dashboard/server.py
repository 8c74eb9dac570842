"""The dashboard as a process: Starlette routes requests, uvicorn serves HTTP and TLS; access is checked first."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from consilience.core.settings import Invalid
from consilience.dashboard.access import AccessRules, is_loopback
from consilience.dashboard.api import Api, encoded
from consilience.dashboard.guard import App, Guard
from consilience.dashboard.pages import Pages
from consilience.dashboard.watch import Watch
from consilience.reporting import interactive
from consilience.reporting.page import POLICY

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_MOST_AT_ONCE = 64  # connections; more are answered 503
_NEEDED = 'the dashboard needs starlette, uvicorn and matplotlib: pip install "consilience[dashboard]"'


def application(pages: Pages, api: Api, access: AccessRules) -> App:
    """The pages behind the guard, as an ASGI application."""
    try:
        from starlette.applications import Starlette
        from starlette.requests import ClientDisconnect
        from starlette.responses import HTMLResponse, PlainTextResponse, Response
        from starlette.routing import Route
    except ImportError as problem:
        raise ImportError(_NEEDED) from problem

    def shown(text: str | None, policy: str = "") -> Response:
        headers = {"content-security-policy": f"{policy}; frame-ancestors 'none'"} if policy else None
        return PlainTextResponse("no such run\n", 404) if text is None else HTMLResponse(text, headers=headers)

    def index(request: Request) -> Response:
        return shown(pages.index())

    def run(request: Request) -> Response:
        return shown(pages.run(request.path_params["name"].rstrip("/")))

    def compare(request: Request) -> Response:
        return shown(pages.comparison(request.query_params.getlist("run")))

    def client(request: Request) -> Response:
        query = request.query_params
        return shown(pages.client(query.get("run", ""), query.get("client", "")))

    def report(request: Request) -> Response:
        name, names = request.path_params["name"].rstrip("/"), request.query_params.getlist("run")
        return shown(pages.report(name, names), policy=interactive.policy() if interactive.is_possible() else POLICY)

    def answer(request: Request) -> Response:
        status, content = api.answer(request.path_params["what"], request.query_params.getlist)
        data, tag = encoded(content)
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(data, status, media_type="application/json", headers={"etag": tag})

    async def act(request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)
        status, content = await run_in_threadpool(api.act, request.path_params["what"], body)
        return Response(encoded(content)[0], status, media_type="application/json")

    def static(request: Request) -> Response:
        found = _static().get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("nothing is here\n", 404)
        return Response(
            found, media_type="text/css" if request.path_params["name"].endswith(".css") else "text/javascript"
        )

    # plain functions: Starlette runs them in threads, so that drawing does not block other requests
    routes = [
        Route("/", index, methods=["GET"]),
        Route("/runs/{name:path}", run, methods=["GET"]),
        Route("/compare", compare, methods=["GET"]),
        Route("/client", client, methods=["GET"]),
        Route("/report/{name:path}", report, methods=["GET"]),
        Route("/api/{what}", answer, methods=["GET"]),
        Route("/static/{name}", static, methods=["GET"]),
    ]
    if access.control:
        routes.append(Route("/control/{what}", act, methods=["POST"]))
    return Guard(Starlette(routes=routes), access)  # type: ignore[arg-type,unused-ignore]


@functools.cache
def _static() -> dict[str, bytes]:
    """The scripts and styles of the pages, by name; no other file is served."""
    place = importlib.resources.files("consilience.dashboard") / "static"
    return {file.name: file.read_bytes() for file in place.iterdir() if file.name.endswith((".js", ".css"))}


def serve(folder: Path, access: AccessRules, *, port: int, refresh: int, with_similarity: bool | None) -> None:
    """Serve until interrupted; by default similarity is shown for simulated clients, on this machine only."""
    try:
        import matplotlib  # noqa: F401
        import uvicorn
    except ImportError as problem:
        raise ImportError(_NEEDED) from problem
    if not folder.is_dir():
        raise Invalid(f"{str(folder)!r} is no folder: name the one that holds the run folders (default: runs)")
    if with_similarity is None and not is_loopback(access.host):
        with_similarity = False
    watch = Watch(folder, controlled=access.control)
    secret = access.page_secret if access.control else ""
    pages = Pages(watch, refresh=refresh, with_similarity=with_similarity, secret=secret)
    app = application(pages, Api(watch), access)
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
    does = "runs can be stopped and resumed" if access.control else "read-only"
    print(f"{access.scheme}://{name}:{listening.getsockname()[1]}/  ({does}; Ctrl-C ends it)", flush=True)
    if access.made_token:
        print(f"the browser asks for a password (any name): {access.token}", file=sys.stderr, flush=True)
    if with_similarity is False:
        print("who resembles whom is not shown; --similarity shows it", file=sys.stderr, flush=True)
    with listening, contextlib.suppress(KeyboardInterrupt):  # the usual way to end a dashboard
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()  # from here on connections wait instead of being refused
    except OSError as problem:
        raise Invalid(f"cannot listen on {host} port {port}: {problem.strerror}; choose another --port") from problem
    return found


def _check_tls(access: AccessRules) -> None:
    """Refuse an unusable certificate at the start, not at the first request."""
    if access.certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(access.certificate, access.key)
    except (OSError, ssl.SSLError) as problem:
        raise Invalid(f"--certificate = {str(access.certificate)!r} and --key cannot be used: {problem}") from problem
