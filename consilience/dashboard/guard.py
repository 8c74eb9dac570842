"""What stands before every page: reading only, known names only, the token, and headers that lock the page up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from consilience.dashboard.access import Door
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

    def __init__(self, app: App, door: Door) -> None:
        self._app, self._door = app, door

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
        if not self._door.knows(sent.get(b"host", "")):
            return 421, "this dashboard is for this machine: use 127.0.0.1 or localhost\n", []
        if not self._door.opens_for(sent.get(b"authorization", "")):
            challenge = b'Basic realm="consilience: any name, the token as password", charset="UTF-8"'
            return 401, "the token is needed\n", [(b"www-authenticate", challenge)]
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this dashboard only shows: GET and HEAD\n", [(b"allow", b"GET, HEAD")]
        return None
