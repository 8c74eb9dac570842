"""The server side of a secure sum: Flower's SecAgg+ workflow, stage by stage, over our own mail.

What we add: masks of another generator (`masks`), deadlines, checks of what nodes send before Flower's code reads it,
a fix for nodes that fall silent early (which Flower's workflow does not remove from its state), and a reason in words
when a sum fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from consilience.core.refusal import Refusal, plain
from consilience.core.settings import Invalid
from consilience.flower.messages import wire
from consilience.flower.messages.mail import Mail
from consilience.flower.secure import masks
from consilience.flower.secure.checked_grid import CheckedGrid, SumRequest, SumResult
from consilience.flower.secure.terms import FEWEST, MODULUS, SecureTerms


def refuse_other_flower() -> None:
    """Refuse, before any client is asked, a Flower without SecAgg+: it lies in the parts that Flower calls legacy."""
    try:
        import flwr.client.mod
        import flwr.compat.common.recorddict_compat
        import flwr.server.workflow.secure_aggregation.secaggplus_workflow  # noqa: F401

        masks.install(masks.SERVER)
    except ImportError as problem:
        raise Invalid(
            f"deploy.secure_aggregation = true needs Flower's SecAgg+, which this version no longer has ({problem}): "
            "use flwr 1.41, or turn it off"
        ) from problem


def secure_sum(mail: Mail, terms: SecureTerms, asked: SumRequest, deadline: float) -> SumResult:
    """The weighted mean of the nodes' vectors, of which the server sees nothing else; `deadline` is for each stage."""
    found, nodes = SumResult(), len(asked.contents)
    if nodes < FEWEST:
        found.why = f"{nodes} nodes are there for a secure sum, which needs at least {FEWEST}"
        return found
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

    needed, shares = terms.needed(nodes), terms.shares(nodes)
    flow = SecAggPlusWorkflow(
        shares if shares < nodes else 1.0,  # 1.0: of all nodes
        needed,
        max_weight=asked.heaviest,
        clipping_range=terms.clip,
        quantization_range=terms.levels,
        modulus_range=MODULUS,
    )
    grid, strategy, state = CheckedGrid(mail, asked, found, deadline), _Strategy(asked.contents), WorkflowState()
    books = _books(strategy)
    stages = (flow.setup_stage, flow.share_keys_stage, flow.collect_masked_vectors_stage, flow.unmask_stage)
    for number, stage in enumerate(stages):
        try:
            with masks.bound(asked.binding, masks.SERVER):
                goes_on = stage(cast(Any, grid), books, state)
        except Exception as problem:  # Flower's code, on unchecked input
            found.why = f"stage {number + 1} of 4 failed ({plain(repr(problem), most=200)})"
            return found
        here = len(state.active_node_ids)
        found.met = found.met or here
        if not goes_on:
            of = "are needed" if shares == nodes else f"of every node's {shares} with shares of its keys are needed"
            found.why = f"{here} of {nodes} nodes answered stage {number + 1} of 4, and {needed} {of}"
            return found
        if number < 2:
            _forget_the_silent(state)
    found.mean = _usable(strategy.mean, terms, asked, found)
    return found


def _forget_the_silent(state: Any) -> None:
    """Remove nodes that fell silent before they had shared their keys from Flower's state.

    No vector holds a mask of theirs; left in, the others would be asked for shares that do not exist, and fail.
    """
    state.sampled_node_ids = set(state.active_node_ids)
    state.nid_to_neighbours = {
        node: near & state.active_node_ids
        for node, near in state.nid_to_neighbours.items()
        if node in state.active_node_ids
    }


def _usable(mean: np.ndarray | None, terms: SecureTerms, asked: SumRequest, found: SumResult) -> np.ndarray | None:
    """The mean, refused if its values cannot be a mean within the clip (masks not removed, or an overflow)."""
    shares = sum(terms.weight(said.examples) for said, _ in found.in_clear.values()) / asked.heaviest
    slack = 2 * (len(found.in_clear) + 1) * terms.step / max(shares, 1e-300)
    if mean is None or mean.shape != (asked.length,) or not np.isfinite(mean).all():
        found.why = "what is left when the masks are off is no sum: not finite, or of another length"
    elif len(mean) and np.abs(mean).max() > terms.clip + slack:
        found.why = (
            f"what is left when the masks are off is no mean of values within {terms.clip:g}: a node has sent "
            "something else, and it cannot be known which"
        )
    elif terms.noise is not None and _is_too_long(mean, terms, asked, len(found.in_clear)):
        found.why = (
            "what is left when the masks are off is longer than a sum of clipped updates and their noise: a node has "
            "not clipped its own, and it cannot be known which"
        )
    return None if found.why else mean


def _is_too_long(mean: np.ndarray, terms: SecureTerms, asked: SumRequest, nodes: int) -> bool:
    """Whether the norm of a private sum exceeds what its members can contribute."""
    assert terms.noise is not None
    needed = terms.needed(len(asked.contents))
    most = terms.noise.longest_sum(asked.bound, step=terms.step, values=len(mean), needed=needed, nodes=nodes)
    return bool(np.linalg.norm(mean) * nodes > most)


class _Strategy:
    """What Flower's workflow needs of a strategy: the nodes to ask, and a receiver of the mean."""

    def __init__(self, nodes: Mapping[int, Any]) -> None:
        self._nodes = list(nodes)
        self.mean: np.ndarray | None = None

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[tuple[Any, Any]]:
        from flwr.common import FitIns

        return [(SimpleNamespace(node_id=node), FitIns(parameters, {})) for node in self._nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        from flwr.common import parameters_to_ndarrays

        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}

    def num_available(self) -> int:
        return len(self._nodes)


def _books(strategy: _Strategy) -> Any:
    """The parts of Flower's LegacyContext that the stages read: round, strategy, no parameters (in our messages)."""
    from flwr.common import Parameters
    from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key

    app = wire.records()
    nothing = Parameters(tensors=[], tensor_type="")
    state = app.RecordDict({MAIN_CONFIGS_RECORD: app.ConfigRecord({Key.CURRENT_ROUND: 1})})
    state[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(nothing, keep_input=True)
    return SimpleNamespace(state=state, strategy=strategy, client_manager=strategy)


def refusals_of(found: SumResult, client_of: Mapping[int, int]) -> list[Refusal]:
    """Refusals with their reasons, by client; non-finite values were refused at the client."""
    refused = [problem.by(client_of[node]) for node, problem in found.refusals]
    for node, why in found.failures.items():
        if why.startswith("Refused: nonfinite"):
            detail = why.removeprefix("Refused: nonfinite")
            refused.append(Refusal(client=client_of[node], reason="nonfinite", detail=f"refused at the client{detail}"))
    if found.why:
        refused.append(Refusal(client="of any node", reason="secure_sum", detail=found.why))
    return refused
