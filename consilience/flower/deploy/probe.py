"""Checks whether the control and runtime routes at a SuperLink's address answer without an account."""

from __future__ import annotations

import http.client
from pathlib import Path

from consilience.core.settings import Invalid
from consilience.flower.deploy.programs import address, connection_to

ROUTES = {"control": "/v1/control/list-runs", "runtime": "/v1/runtime/acquire-task"}  # an empty request changes nothing
CLOSED = (404,)  # the gateway's answer to all routes but those of nodes
ASKS_WHO = (401, 403)
HARM = {
    "control": "anybody who can reach it may list and register nodes and start runs, whose code every node then runs",
    "runtime": "anybody who can reach it may take the place of the server's app",
}


def answers(place: str, authority: Path | None, *, seconds: float = 10.0) -> dict[str, int]:
    """The status codes of the routes for a request without key, token or account."""
    host, port = address(place, "the SuperLink")
    found = {}
    for name, route in ROUTES.items():
        connection = connection_to(host, port, authority, seconds)
        try:
            connection.request("POST", route, body=b"", headers={"content-type": "application/protobuf"})
            found[name] = connection.getresponse().status
        except (OSError, http.client.HTTPException) as problem:
            raise Invalid(f"the SuperLink at {place} cannot be asked for {route}: {problem}") from problem
        finally:
            connection.close()
    return found


def explain(place: str, found: dict[str, int]) -> str:
    """What was found, in words; `Invalid` where a route answers without an account."""
    for name, code in found.items():
        if code not in CLOSED + ASKS_WHO:
            raise Invalid(
                f"{place} is open: its {name} routes answer without an account (code {code}); {HARM[name]}. Start "
                "the server's side with `consilience deploy link`, which keeps them on loopback, or close the port"
            )
    asked = [name for name, code in found.items() if code in ASKS_WHO]
    if asked:
        return f"its {' and '.join(asked)} routes can be reached, and need an account"
    return "only the routes of nodes can be reached"
