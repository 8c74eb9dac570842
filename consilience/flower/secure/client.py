"""The client side of a secure sum: Flower's SecAgg+ around our answer, and the checks before it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from consilience.core import rng, tree
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.flower.messages import wire
from consilience.flower.secure import masks, private
from consilience.flower.secure.terms import FEWEST, MODULUS, SecureTerms, VectorLayout
from consilience.wire.template import Template

Answer = Callable[[Any, Any], Any]
"""From a message's content and Flower's Context to the records of the answer."""


def masked(message: Any, context: Any, terms: SecureTerms, answer: Answer) -> Any:
    """One of the four stages: SecAgg+'s reply, after the server's configs were compared with the terms."""
    from flwr.app import Message
    from flwr.client.mod import secaggplus_mod
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

    if RECORD_KEY_CONFIGS not in message.content.config_records:
        raise Invalid("this node takes part in secure sums only, and was asked for a reply in clear")
    configs = message.content.config_records[RECORD_KEY_CONFIGS]
    _refuse_other_terms(configs, message.metadata.dst_node_id, terms)
    _refuse_earlier_turns(message.content, context, configs)
    info, pairs = _masks_of(message.content, configs)
    bound = private.bound_in(message.content) if terms.noise is not None and pairs else None
    with _numpy_as_it_was(), masks.bound(info, masks.CLIENT) as drawn:
        reply = secaggplus_mod(message, context, lambda asked, ctx: Message(answer(asked.content, ctx), reply_to=asked))
    if drawn.drawn != pairs:  # a version of Flower that draws masks elsewhere
        raise Invalid(f"{drawn.drawn} masks were drawn from the generator of secure sums, not {pairs}: not sent")
    if bound is not None:
        private.add_noise(reply.content.config_records[RECORD_KEY_CONFIGS], terms, bound, _nodes(context))
    return reply


def contribution(context: Any, seed: int, said: wire.ReplyReport, reply: Tree, shared: Tree, terms: SecureTerms) -> Any:
    """A reply in SecAgg+'s form: one clipped vector and its weight, with a report in clear.

    The reply was checked to be finite, since the server cannot check a masked one. A private reply is not checked but
    clipped; nothing in clear depends on its rows.
    """
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict

    layout, weight = VectorLayout(Template.of(reply)), terms.weight(said.examples)
    _refuse_overweight(context, weight)
    if terms.noise is None:
        vector = layout.vector(reply, shared)
        beyond = int((np.abs(vector) > terms.clip).sum())
    else:
        vector, beyond = private.vector(reply, shared, terms.noise), 0
    parameters = ndarrays_to_parameters([np.clip(vector, -terms.clip, terms.clip)])
    status = Status(code=Code.OK, message="")
    content = fitres_to_recorddict(FitRes(status, parameters, num_examples=weight, metrics={}), keep_input=True)
    wire.put_answer(content, [said])
    flat = tree.flatten(reply)
    counters = {path: int(flat[path]) for path in layout.counters}
    wire.put_json(content, wire.ASIDE, asdict(wire.ClearReport(clipped=beyond, counters=counters)))
    wire.put_json(context.state, _last(said.run), said.round)
    # SecAgg+ rounds at random, by NumPy's global generator: seeded here, so that a run repeats bit for bit
    np.random.seed(rng.key(seed, "secure sum", said.round, said.client) % MODULUS)
    return content


def refuse_repetition(context: Any, order: wire.Order) -> None:
    """Refuse a second sum in a round: the difference of two, with and without a client, would reveal its reply."""
    last = wire.get_json(context.state, _last(order.run)) if _last(order.run) in context.state else -1
    if order.round <= last:
        raise Invalid(f"this node has given its reply of round {last + 1} to a sum, and gives no other up to there")


def _masks_of(content: Any, configs: Any) -> tuple[bytes, int]:
    """The binding of this stage's masks, and their number: one of its own and one for each neighbour."""
    from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage

    if configs.get(Key.STAGE) != Stage.COLLECT_MASKED_VECTORS:
        return b"", 0
    order, about = wire.get_order(content), wire.get_json(content, wire.ABOUT)
    info = masks.binding(run=order.run, case=order.case, round=order.round, turn=int(about["turn"]))
    return info, 1 + len(configs.get(Key.SOURCE_LIST, ()))


def _last(run: str) -> str:
    return f"consilience.summed.{run}"


def _refuse_other_terms(configs: Any, node: int, terms: SecureTerms) -> None:
    """Refuse a server that would make the sum less secret than was agreed on; types are Flower's to check."""
    from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage

    stage = configs.get(Key.STAGE)
    if stage == Stage.SETUP:
        nodes = configs.get(Key.SAMPLE_NUMBER, 0)
        agreed = {
            Key.SHARE_NUMBER: terms.shares(nodes),
            Key.THRESHOLD: terms.needed(nodes),
            Key.CLIPPING_RANGE: terms.clip,
            Key.TARGET_RANGE: terms.levels,
            Key.MOD_RANGE: MODULUS,
        }
        for key, value in agreed.items():
            if configs.get(key) != value:
                raise Invalid(f"the server wants a secure sum with {key} = {configs.get(key)}: {value} was agreed on")
        if nodes < FEWEST:
            raise Invalid(f"the server wants a secure sum of {nodes} nodes: at least {FEWEST} are needed")
    elif stage == Stage.UNMASK:
        there, gone = configs.get(Key.ACTIVE_NODE_ID_LIST, []), configs.get(Key.DEAD_NODE_ID_LIST, [])
        if node not in there or len({*there, *gone}) != len(there) + len(gone):
            raise Invalid("the server asks for both masks of one client: refused")


def _refuse_earlier_turns(content: Any, context: Any, configs: Any) -> None:
    """Refuse a late message of an earlier sum, which must not change the keys of the current one."""
    from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage

    about = wire.get_json(content, wire.ABOUT)
    name, turn = f"consilience.secure.{about['case']}", int(about["turn"])
    begun = wire.get_json(context.state, name) if name in context.state else -1
    if turn < begun or (turn != begun and configs.get(Key.STAGE) != Stage.SETUP):
        raise Invalid(f"this belongs to secure sum {turn}, and {begun} has begun here")
    wire.put_json(context.state, name, turn)


def _nodes(context: Any) -> int:
    """How many nodes this sum began with."""
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_STATE, Key

    return int(context.state.config_records[RECORD_KEY_STATE][Key.SAMPLE_NUMBER])


def _refuse_overweight(context: Any, weight: int) -> None:
    """Refuse a weight that would overflow the sum."""
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_STATE, Key

    most = context.state.config_records[RECORD_KEY_STATE][Key.MAX_WEIGHT]
    if weight > most:
        raise Invalid(f"this client has {weight} rows, and the sum has room for {most:g}: the rows have changed")


@contextlib.contextmanager
def _numpy_as_it_was() -> Iterator[None]:
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)
