"""Clock difference from the SuperLink, for which Flower refuses a SuperNode without a message.

Nodes sign the time with every request. The SuperLink answers 401 to a stamp out of bounds, whatever the key, and the
SuperNode then ends with code 0. Every answer, also that to an unknown address, carries the server's date.
"""

from __future__ import annotations

import email.utils
import http.client
import time
from pathlib import Path

from consilience.core.settings import Invalid
from consilience.flower.deploy.programs import connection_to

AHEAD, BEHIND = 5.0, 305.0  # seconds that a SuperNode's clock may be off: flwr's TIMESTAMP_ and SYSTEM_TIME_TOLERANCE
OUT_OF_DATE = (9, 10)  # OpenSSL's codes for a certificate that is not yet, or no longer, valid
COARSE = 1.0  # the server's date has whole seconds


def difference(address: str, authority: Path | None, *, seconds: float = 10.0) -> float:
    """Seconds by which this clock is ahead of that of the SuperLink at host:port, to one second; TLS if `authority`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise Invalid(f"{address!r} is no address of a SuperLink: write host:port, such as fl.example.org:8000")
    connection = connection_to(host.strip("[]"), int(port), authority, seconds)
    try:
        began, here = time.monotonic(), time.time()
        connection.request("GET", "/")
        there = connection.getresponse().getheader("date")
        here += (time.monotonic() - began) / 2  # the server's date is taken as that of the middle of the request
    except (OSError, http.client.HTTPException) as problem:
        doubt = ": is this machine's clock right?" if getattr(problem, "verify_code", 0) in OUT_OF_DATE else ""
        raise Invalid(f"the SuperLink at {address} cannot be reached: {problem}{doubt}") from problem
    finally:
        connection.close()
    if there is None:
        raise Invalid(f"what answers at {address} does not say what time it is: is it a SuperLink?")
    return here - (email.utils.parsedate_to_datetime(there).timestamp() + COARSE / 2)


def refused(ahead: float) -> bool:
    """Whether Flower refuses a node whose clock is `ahead` seconds ahead of the SuperLink's, within the precision."""
    return ahead > AHEAD - COARSE or -ahead > BEHIND - COARSE


def explain(ahead: float) -> str:
    """The difference in words, and what it means for a SuperNode."""
    if abs(ahead) <= COARSE:
        return "this machine's clock and the SuperLink's agree to a second"
    side = "ahead of" if ahead > 0 else "behind"
    found = f"clock differs by {abs(ahead):.0f} s: this machine's is {side} the SuperLink's"
    if not refused(ahead):
        return f"{found}, which Flower allows (at most {AHEAD:.0f} s ahead, {BEHIND:.0f} s behind)"
    return (
        f"{found}. Flower allows {AHEAD:.0f} s ahead and {BEHIND:.0f} s behind; it refuses this machine's SuperNodes, "
        "which then end without a reason: set the clock (NTP) and start them again"
    )
