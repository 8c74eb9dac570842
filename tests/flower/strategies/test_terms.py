"""The terms for a user's own loop: against closed forms, and against whole rounds of the library's own rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from declared import build
from torch import Tensor, nn

from consilience.core import tree
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.flower.strategies.terms import (
    FedDCTerm,
    FedDynTerm,
    FedProxTerm,
    FedSiamTerm,
    FedSplitTerm,
    MoonTerm,
    ScaffoldState,
    correct_gradients,
    scaffold_reply,
)
from consilience.selection import Everyone

LR, EPOCHS, ROUNDS = 0.05, 3, 3
pytestmark = pytest.mark.usefixtures("untraced")


def moved(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model somewhere else."""
    draw = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for value in other.parameters():
            value += torch.randn(value.shape, generator=draw, dtype=value.dtype)
    return other


def flat(values: Any) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in values])


def gradients(model: nn.Module, value: Tensor) -> Tensor:
    return flat(torch.autograd.grad(value, list(model.parameters())))


def noise(model: nn.Module, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in model.named_parameters()}


# --- closed forms ----------------------------------------------------------------------------------------------------


def test_fedprox_is_half_mu_times_the_squared_distance() -> None:
    """Squared: the example in Flower's FedProx docstring adds mu/2 times the distance itself."""
    start = tiny.mlp().double()
    term, model = FedProxTerm(start, mu=0.7), moved(start)
    away = flat(model.parameters()) - flat(start.parameters())
    value = term(model)
    assert value.item() == pytest.approx(0.35 * (away @ away).item(), rel=1e-14)
    assert value.item() != pytest.approx(0.35 * away.norm().item(), rel=0.1)
    assert torch.allclose(gradients(model, value), 0.7 * away, rtol=0, atol=1e-14)
    assert term(start).item() == 0


def test_what_the_server_sent_is_kept_while_the_model_moves() -> None:
    model = tiny.mlp().double()
    term, before = FedProxTerm(model, mu=1.0), flat(model.parameters()).clone()
    with torch.no_grad():
        for value in model.parameters():
            value += 1
    assert torch.allclose(gradients(model, term(model)), flat(model.parameters()) - before)


def test_frozen_parameters_have_no_part_in_it() -> None:
    model = tiny.mlp().double()
    first = next(model.parameters())
    first.requires_grad_(False)
    term = FedProxTerm(model, mu=2.0)
    with torch.no_grad():
        first += 5
    assert term(model).item() == 0


def test_feddyn_by_hand() -> None:
    start = tiny.mlp().double()
    memory, model = noise(start, 3), moved(start)
    term = FedDynTerm(start, alpha=0.3, gradient=memory)
    away, g = flat(model.parameters()) - flat(start.parameters()), flat(memory.values())
    value = term(model)
    assert value.item() == pytest.approx(float(-g @ flat(model.parameters()) + 0.15 * away @ away), rel=1e-13)
    assert torch.allclose(gradients(model, value), -g + 0.3 * away, atol=1e-14)
    assert torch.allclose(flat(term.remembered(model).values()), g - 0.3 * away, atol=1e-14)


def test_fedsplit_by_hand() -> None:
    start = tiny.mlp().double()
    z, model = noise(start, 4), moved(start)
    term = FedSplitTerm(start, step=0.5, z=z, relaxation=0.8)
    w, x, centre = flat(model.parameters()), flat(start.parameters()), 2 * flat(start.parameters()) - flat(z.values())
    value = term(model)
    assert value.item() == pytest.approx(float((w - centre) @ (w - centre)), rel=1e-13)  # 1 / (2 x 0.5) = 1
    assert torch.allclose(gradients(model, value), 2 * (w - centre), atol=1e-13)
    assert torch.allclose(flat(term.remembered(model).values()), flat(z.values()) + 1.6 * (w - x), atol=1e-13)
    first = FedSplitTerm(start, step=0.5)  # z = x: an ordinary proximal term with mu = 1/step
    assert first(model).item() == pytest.approx(float(FedProxTerm(start, mu=2.0)(model)), rel=1e-13)


def test_scaffold_by_hand() -> None:
    start = tiny.mlp().double()
    c, own = noise(start, 5), noise(start, 6)
    state, model = ScaffoldState(start, c, own), copy.deepcopy(start)
    for value in model.parameters():
        value.grad = torch.ones_like(value)
    correct_gradients(model, state)
    assert torch.allclose(flat(p.grad for p in model.parameters()), 1 + flat(c.values()) - flat(own.values()))
    correct_gradients(model, state)
    model = moved(start)
    change, kept = scaffold_reply(model, state, lr=0.1)  # two steps
    mean = (flat(start.parameters()) - flat(model.parameters())) / (2 * 0.1)
    assert torch.allclose(flat(change.values()), mean - flat(c.values()), atol=1e-12)
    assert torch.allclose(flat(kept.values()), flat(own.values()) - flat(c.values()) + mean, atol=1e-12)


def test_scaffold_without_a_step_changes_nothing() -> None:
    start = tiny.mlp().double()
    own = noise(start, 6)
    change, kept = scaffold_reply(start, ScaffoldState(start, noise(start, 5), own), lr=0.1)
    assert float(flat(change.values()).abs().max()) == 0 and tiny.same(kept, own)


def test_feddc_by_hand() -> None:
    start = tiny.mlp().double()
    c, h, own, model = noise(start, 1), noise(start, 2), noise(start, 3), moved(start)
    term = FedDCTerm(start, 0.4, c, {"drift": h, "control_variate": own})
    w, x = flat(model.parameters()), flat(start.parameters())
    near, slope = flat(h.values()) + w - x, flat(c.values()) - flat(own.values())
    value = term(model)
    assert value.item() == pytest.approx(float(0.2 * near @ near + slope @ w), rel=1e-13)
    assert torch.allclose(gradients(model, value), 0.4 * near + slope, atol=1e-13)
    change, kept = term.reply(model, lr=0.1, steps=4)
    assert torch.allclose(flat(kept["drift"].values()), flat(h.values()) + w - x, atol=1e-13)
    assert torch.allclose(flat(change.values()), (x - w) / 0.4 - flat(c.values()), atol=1e-12)


def heads() -> Any:
    return tiny.MODELS_WITH_HEADS["mlp"]().double()


def test_moon_is_a_cross_entropy_of_two_cosines() -> None:
    start = heads().eval()
    last, model, x = moved(start, 2), moved(start, 3), torch.randn(6, 1, 6, 6, dtype=torch.float64)
    term = MoonTerm(start, previous=last.state_dict(), mu=1.5, temperature=0.3)
    z = model.features(x)
    cosines = torch.stack([F.cosine_similarity(z, other.features(x)) for other in (start, last)], 1) / 0.3
    by_hand = 1.5 * F.cross_entropy(cosines, torch.zeros(6, dtype=torch.int64))
    assert term(z, x).item() == pytest.approx(float(by_hand), rel=1e-12)
    assert float(MoonTerm(start, mu=1.5)(z, x)) == 0


def test_siamese_term_by_hand() -> None:
    start = heads().eval()
    last, model, x = moved(start, 2), moved(start, 3), torch.randn(6, 1, 6, 6, dtype=torch.float64)
    z = model.features(x)
    p = model.predict(z)
    similar = F.cosine_similarity
    still = FedSiamTerm(start, previous=last.state_dict(), mu=0.4, freeze_global=True)
    by_hand = similar(last.features(x), z).mean() - similar(p, start.features(x)).mean() / 2
    assert still(z, p, x).item() == pytest.approx(0.4 * float(by_hand), rel=1e-12)
    assert list(still.parameters()) == []
    learning = FedSiamTerm(start, mu=0.4)
    value = learning(z, p, x)
    assert all(g is not None for g in torch.autograd.grad(value, list(learning.parameters()), allow_unused=True)[:2])


# --- a user's loop does what the library's client does ---------------------------------------------------------------

Loop = Callable[[nn.Module, Any, Tensor, dict[str, Any], dict[str, Any]], dict[str, Any]]


def descend(model: nn.Module, x: Any, y: Tensor, term: Callable[[nn.Module], Any], after: Any = None) -> None:
    """Plain full-batch SGD, as anybody would write it."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(EPOCHS):
        optimiser.zero_grad()
        (F.cross_entropy(model(x), y) + term(model)).backward()
        if after is not None:
            after(model)
        optimiser.step()


def fedprox_loop(model: Any, x: Any, y: Tensor, sent: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    descend(model, x, y, FedProxTerm(model, mu=0.1))
    return {}


def feddyn_loop(model: Any, x: Any, y: Tensor, sent: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    term = FedDynTerm(model, alpha=0.1, gradient=memory.get("gradient"))
    descend(model, x, y, term)
    memory["gradient"] = term.remembered(model)
    return {}


def fedsplit_loop(model: Any, x: Any, y: Tensor, sent: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    term = FedSplitTerm(model, step=1.0, z=sent.get("z", memory.get("z")))
    descend(model, x, y, term)
    memory["z"] = term.remembered(model)
    return {}


def scaffold_loop(model: Any, x: Any, y: Tensor, sent: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    state = ScaffoldState(model, sent["control_variate"], memory.get("own"))
    descend(model, x, y, lambda _: 0, lambda one: correct_gradients(one, state))
    change, memory["own"] = scaffold_reply(model, state, lr=LR)
    return {"control_change": change}


def feddc_loop(model: Any, x: Any, y: Tensor, sent: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    term = FedDCTerm(model, 0.1, sent["control_variate"], memory.get("kept"))
    descend(model, x, y, term)
    change, memory["kept"] = term.reply(model, lr=LR, steps=EPOCHS)
    return {"control_change": change}


def moon_loop(model: Any, x: Any, y: Tensor, sent: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    term = MoonTerm(model, memory.get("previous"))
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(EPOCHS):
        optimiser.zero_grad()
        z = model.features(x)
        (F.cross_entropy(model.head(z), y) + term(z, x)).backward()
        optimiser.step()
    memory["previous"] = copy.deepcopy(model.state_dict())
    return {}


def fedsiam_loop(model: Any, x: Any, y: Tensor, sent: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    term = FedSiamTerm(model, memory.get("previous"))
    model.train()
    optimiser = torch.optim.SGD([*model.parameters(), *term.parameters()], lr=LR)
    for epoch in range(EPOCHS):
        if epoch:
            term.new_epoch(model)
        optimiser.zero_grad()
        z = model.features(x)
        (F.cross_entropy(model.head(z), y) + term(z, model.predict(z), x)).backward()
        optimiser.step()
    memory["previous"] = copy.deepcopy(model.state_dict())
    return {}


LOOPS: dict[str, tuple[Loop, Callable[[], nn.Module]]] = {
    "fedprox": (fedprox_loop, tiny.mlp),
    "feddyn": (feddyn_loop, tiny.mlp),
    "fedsplit": (fedsplit_loop, tiny.mlp),
    "fedprox_fedsplit": (fedsplit_loop, tiny.mlp),  # z stays with the client; above, the server keeps it
    "scaffold": (scaffold_loop, tiny.mlp),
    "feddc": (feddc_loop, tiny.mlp),
    "moon": (moon_loop, tiny.MODELS_WITH_HEADS["mlp"]),
    "fedsiam_da": (fedsiam_loop, tiny.MODELS_WITH_HEADS["mlp"]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_ones_own_gives_the_librarys_replies(name: str) -> None:
    loop, model = LOOPS[name]
    data = tiny.federation((9, 4, 12))  # a batch of one has no statistics of its own
    recipe = build(name, selection=Everyone(), lr=LR, epochs=EPOCHS, batch_size=None)
    rounds = list(run(recipe, tiny.engine(model, data), rounds=ROUNDS, seed=0))
    state = recipe.server.init(tiny.engine(model, data).start(), 3)
    memories: list[dict[str, Any]] = [{} for _ in range(3)]
    for one in rounds:
        broadcast = recipe.server.broadcast(state, np.arange(3))
        for client in range(3):
            sent = {**broadcast.shared, **tree.rows(broadcast.personal, client)}
            module = model().double()
            module.load_state_dict({**sent["model"]["params"], **sent["model"]["buffers"]})
            x, y = data.train.of(client)
            said = loop(module, x, y, sent, memories[client])
            expected = tree.rows(one.cohort.reply, client)
            got = {kind: {key: module.state_dict()[key] for key in leaves} for kind, leaves in sent["model"].items()}
            assert tiny.gap(got, expected["model"]) <= 1e-12
            for key, value in said.items():
                assert tiny.gap(dict(value), expected[key]) <= 1e-12
        state = one.snapshot.server


def test_normalisation_layers_stay_personal_and_memory_in_the_state() -> None:
    flwr = pytest.importorskip("flwr.app", reason="Flower is not installed: pip install 'consilience[flower]'")
    from consilience.flower.strategies.memory import load_shared, personal_values, recall, remember

    context = flwr.Context(run_id=1, node_id=1, node_config={}, state=flwr.RecordDict(), run_config={})
    mine, sent = tiny.convnet(), moved(tiny.convnet())
    with torch.no_grad():
        mine[1].running_mean += 3
    assert recall(context, "personal") is None
    remember(context, "personal", personal_values(mine))
    kept = recall(context, "personal")
    assert kept is not None and set(kept) == {n for n in mine.state_dict() if n.startswith(("1.", "6."))}
    model = tiny.convnet()
    load_shared(model, flwr.ArrayRecord(sent.state_dict()), kept)
    for name, value in model.state_dict().items():
        assert torch.equal(value, (mine if name in kept else sent).state_dict()[name]), name


def test_what_does_not_fit_is_named() -> None:
    model = tiny.mlp().double()
    with pytest.raises(Invalid, match=r"gradient is missing for '1\.weight'"):
        FedDynTerm(model, 0.1, {"other": torch.zeros(1)})
    with pytest.raises(Invalid, match=r"z is of shape \(1,\) for '1.weight'"):
        FedSplitTerm(model, 1.0, {n: torch.zeros(1) for n, _ in model.named_parameters()})
    with pytest.raises(Invalid, match="'other', which is not in this model"):
        ScaffoldState(model, {"other": torch.zeros(1)})
    with pytest.raises(Invalid, match=r"Proximal\.mu = -1"):
        FedProxTerm(model, -1)
    with pytest.raises(Invalid, match="has no predict"):
        FedSiamTerm(model)
    with pytest.raises(Invalid, match="has no features"):
        MoonTerm(model, model.state_dict())(torch.zeros(1, 2), torch.zeros(1, 36))
