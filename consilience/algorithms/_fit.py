"""Whether the parts of an algorithm can meet."""

from __future__ import annotations

from consilience.client.local_training import LocalTraining
from consilience.client.memory.memory import Says
from consilience.client.terms.term import Hears
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid
from consilience.server.averaging.averaging import Averaging
from consilience.server.protocols import read_by


def refuse_misfits(algorithm: Algorithm) -> Algorithm:
    """The algorithm itself; refused if its client listens for what its server never tells, or the other way round."""
    client, server = algorithm.client, algorithm.server
    if not isinstance(client, LocalTraining) or not isinstance(server, Averaging):
        return algorithm
    told = [ledger.name for ledger in server.ledgers]
    if len(set(told)) < len(told):
        raise Invalid(f"ledgers holds {', '.join(told)}: no two may have one name")
    for part in (*client.terms, *client.memory):
        for name in part.hears if isinstance(part, Hears) else ():
            if name not in told:
                raise Invalid(
                    f"{type(part).__name__} listens for {name!r}, which no ledger of the server tells "
                    f"(ledgers: {', '.join(told) or 'none'}): add the ledger, or use a recipe that brings it along"
                )
    said = {name for part in client.memory if isinstance(part, Says) for name in part.says}
    for reader in (server.weighting, *server.ledgers):
        for name in read_by(reader):
            if name not in said:
                raise Invalid(
                    f"{type(reader).__name__} reads {name!r} in the replies, which no memory of the client says: "
                    "add the memory, or use a recipe that brings it along"
                )
    return algorithm
