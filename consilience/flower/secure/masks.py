"""The masks of secure sums: ChaCha20 under a key of its own for every pair, run, round and sum.

Flower 1.41 folds the 256 bits on which two clients agree into 32 and draws masks by NumPy's Mersenne twister (its issue
7522). Its protocol calls one function for that, by a name in its module: here the name is bound to another function,
which serves our sums and passes all others to Flower's own. The rest of the protocol is unchanged; subclassing is not
possible, since Flower's client side is functions.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from consilience.core.settings import Invalid

CLIENT = "flwr.client.mod.secure_aggregation.secaggplus_mod"
SERVER = "flwr.server.workflow.secure_aggregation.secaggplus_workflow"
NAME = "pseudo_rand_gen"  # the function that both modules call
WORD = np.dtype("<u4")  # masks are uniform in 0 .. 2^32 - 1


@dataclass(eq=False)
class MaskBinding:
    """The sum that masks belong to, and how many were drawn for it."""

    info: bytes
    drawn: int = 0


_current: ContextVar[MaskBinding | None] = ContextVar("consilience secure sum", default=None)


def binding(*, run: str, case: str, round: int, turn: int) -> bytes:
    """The context from which mask keys are derived; it is different for every sum."""
    return json.dumps(["consilience secure sum", run, case, round, turn]).encode()


def mask(secret: bytes, info: bytes, count: int) -> np.ndarray:
    """[count] int64, uniform in 0 .. 2^32 - 1: ChaCha20's stream under HKDF-SHA256(secret, info)."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # key and nonce both from the secret: each key is used for one stream only. A stream has 2^32 blocks of 64 bytes
    derived = HKDF(algorithm=hashes.SHA256(), length=48, salt=None, info=info).derive(secret)
    nonce = bytes(4) + derived[36:]  # the first four bytes are ChaCha20's block counter
    stream = Cipher(algorithms.ChaCha20(derived[:32], nonce), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(WORD.itemsize * count)), WORD).astype(np.int64)


@contextlib.contextmanager
def bound(info: bytes, *modules: str) -> Iterator[MaskBinding]:
    """A context in which Flower's code draws masks from our generator."""
    for name in modules or (CLIENT, SERVER):
        install(name)
    mine = MaskBinding(info)
    token = _current.set(mine)
    try:
        yield mine
    finally:
        _current.reset(token)


def install(name: str) -> None:
    """Put our generator in the place of Flower's, once; `Invalid` if this version of Flower has none there."""
    module = importlib.import_module(name)
    theirs = getattr(module, NAME, None)
    if theirs is None:
        raise Invalid(
            f"deploy.secure_aggregation = true needs the function {NAME} of {name}, which this version of Flower "
            "no longer has: use flwr 1.41, or turn it off"
        )
    if not isinstance(theirs, _Generator):
        setattr(module, NAME, _Generator(theirs))


class _Generator:
    """Called by Flower's code for every mask."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs  # for sums of others in this process

    def __call__(self, seed: bytes, num_range: int, dimensions_list: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        mine = _current.get()
        if mine is None:
            return self._theirs(seed, num_range, dimensions_list)
        if num_range != 1 << 32:
            raise Invalid(f"masks are drawn from 2^32 numbers, not from {num_range}")
        mine.drawn += 1
        values, found, place = mask(seed, mine.info, sum(map(math.prod, dimensions_list))), [], 0
        for shape in dimensions_list:
            size = math.prod(shape)
            found.append(values[place : place + size].reshape(shape))
            place += size
        return found
