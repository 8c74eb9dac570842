"""Checks every request before any page: host name, token, method, and for actions the origin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from consilience.dashboard.access import AccessRules

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Refusal = tuple[int, str, list[tuple[bytes, bytes]]]

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Only this server's own script files are allowed."""

HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
CONTROLS = ("/control/stop", "/control/resume")
_MOST_BODY = 4096


class Guard:
    """Passes GET and HEAD to the pages, and control requests if they are allowed; refuses all others."""

    def __init__(self, app: App, access: AccessRules) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # websockets are refused

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = list(message.get("headers", []))
                own = HEADERS | ({} if any(k == b"content-security-policy" for k, _ in said) else _POLICY)
                message["headers"] = [*said, *((name.encode(), value.encode()) for name, value in own.items())]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, guarded)
            return
        status, text, extra = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *extra]
        await guarded({"type": "http.response.start", "status": status, "headers": headers})
        await guarded({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else text.encode()})

    def _refusal(self, scope: Message) -> Refusal | None:
        """Status, text and headers of a refusal; None if the request is accepted."""
        sent = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._access.accepts_host(sent.get(b"host", "")):
            return 421, "this dashboard is for this machine: use 127.0.0.1 or localhost\n", []
        if not self._access.authorises(sent.get(b"authorization", "")):
            challenge = b'Basic realm="consilience: any name, the token as password", charset="UTF-8"'
            return 401, "the token is needed\n", [(b"www-authenticate", challenge)]
        controls = self._access.control and scope["path"] in CONTROLS
        if controls:
            return self._control_refusal(scope["method"], sent)
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this dashboard only shows: GET and HEAD\n", [(b"allow", b"GET, HEAD")]
        return None

    def _control_refusal(self, method: str, sent: dict[bytes, str]) -> Refusal | None:
        """An action needs the token (checked before), our own page as its origin, and that page's secret."""
        if method != "POST":
            return 405, "POST acts on a run\n", [(b"allow", b"POST")]
        own = f"{self._access.scheme}://{sent.get(b'host', '')}".lower()
        if sent.get(b"origin", "").lower() != own or sent.get(b"sec-fetch-site", "same-origin") != "same-origin":
            return 403, "only pages of this dashboard may act on runs\n", []
        if not self._access.is_own_page(sent.get(b"x-consilience-page", "")):
            return 403, "this page is of an earlier start of the dashboard: load it again\n", []
        if sent.get(b"content-type", "").partition(";")[0].strip().lower() != "application/json":
            return 415, "application/json is needed\n", []
        length = sent.get(b"content-length", "")
        if not length.isdecimal() or int(length[:9]) > _MOST_BODY:
            return 413, f"a body of at most {_MOST_BODY} bytes is needed\n", []
        return None


_POLICY = {"content-security-policy": f"{PAGE_POLICY}; frame-ancestors 'none'"}
