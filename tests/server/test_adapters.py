"""Rules for low-rank adapters against computations by hand: NumPy, float64, dense matrices."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

import consilience as cs
from consilience.client.memory.corrections import ControlVariate
from consilience.client.terms.linear import Linear
from consilience.client.terms.proximal import Proximal
from consilience.core import tree
from consilience.core.federation import Federation
from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.layers import adapters
from consilience.layers.adapters import Pair, pairs_in, pairs_of
from consilience.models.adapted import LoRALinear
from consilience.server.averaging.combining.redecomposed import Redecomposed, svd_of_product, truncated
from consilience.server.averaging.ledgers.drift import ControlVariates
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
IN, OUT, RANK, SCALING = 6, 5, 3, 0.75
SIZES = (4, 9, 2, 6)
SHARES = np.array(SIZES) / sum(SIZES)
LR, EPOCHS, ROUNDS = 0.3, 4, 3
USUAL: dict[str, Any] = {"lr": LR, "epochs": EPOCHS, "batch_size": None}
LANES = ("serial", "batched", "streams")
A, B, MERGED = "lora_A.weight", "lora_B.weight", "lora_merged"


def layer(rank: int = RANK) -> nn.Module:
    """One adapted layer."""
    return tiny.seeded(lambda: LoRALinear(nn.Linear(IN, OUT), rank, SCALING * rank)).double()


def rows(sizes: tuple[int, ...] = SIZES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    x = [torch.randn(n, IN, generator=draw, dtype=torch.float64) for n in sizes]
    return [(one, torch.randn(len(one), OUT, generator=draw, dtype=torch.float64)) for one in x]


def trained(algorithm: Any, module: nn.Module, *, lane: Any = "serial", rounds: int = ROUNDS, data: Any = None) -> Any:
    task = algorithm.prepared(Task(module, "regression"))
    federation = Federation.from_clients(rows() if data is None else data)
    engine = Vectorised(task, federation, device="cpu", dtype="float64", lane=lane)
    return list(run(algorithm, engine, rounds=rounds, seed=5))


# --- by hand ---------------------------------------------------------------------------------------------------------


class ByHand:
    """The layer y = (W + s (D + B A)) x + b and its gradient descent on squared errors, full batches."""

    def __init__(self, rank: int = RANK) -> None:
        values = {name: value.detach().numpy() for name, value in layer(rank).named_parameters()}
        self.w, self.bias = values["base_layer.weight"], values["base_layer.bias"]
        self.a, self.b = values[A].copy(), values[B].copy()
        self.d = np.zeros((OUT, IN))
        self.data = [(x.numpy(), y.numpy()) for x, y in rows()]

    def train(
        self, client: int, a: np.ndarray, b: np.ndarray, *, moves_a: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        x, y = self.data[client]
        for _ in range(EPOCHS):
            output = x @ (self.w + SCALING * (self.d + b @ a)).T + self.bias
            slope = (2 * (output - y) / y.size).T @ x  # [out, in]: that of the whole weight
            a, b = a - LR * SCALING * b.T @ slope if moves_a else a, b - LR * SCALING * slope @ a.T
        return a, b


def fedit() -> ByHand:
    here = ByHand()
    for _ in range(ROUNDS):
        replies = [here.train(k, here.a, here.b) for k in range(len(SIZES))]
        here.a = sum(p * a for p, (a, _) in zip(SHARES, replies))
        here.b = sum(p * b for p, (_, b) in zip(SHARES, replies))
    return here


def ffa_lora() -> ByHand:
    here = ByHand()
    for _ in range(ROUNDS):
        here.b = sum(p * here.train(k, here.a, here.b, moves_a=False)[1] for k, p in enumerate(SHARES))
    return here


def flexlora(split: str, ranks: tuple[int, ...] = (RANK,) * len(SIZES)) -> ByHand:
    here = ByHand()
    for _ in range(ROUNDS):
        product = np.zeros((OUT, IN))
        for k, p in enumerate(SHARES):
            a, b = here.train(k, here.a[: ranks[k]], here.b[:, : ranks[k]])
            product += p * b @ a
        u, s, vh = np.linalg.svd(product)
        root = s[:RANK, None] ** (0.5 if split == "even" else 0)
        here.a, here.b = root * vh[:RANK], u[:, :RANK] * s[:RANK] / root.T
    return here


def flora(first: list[np.ndarray], ranks: tuple[int, ...] = (RANK,) * len(SIZES)) -> ByHand:
    """`first` are the A with which rounds begin."""
    here = ByHand()
    for number in range(ROUNDS):
        stacks = [here.train(k, first[number][: ranks[k]], np.zeros((OUT, ranks[k]))) for k in range(len(SIZES))]
        left = np.concatenate([p * b for p, (_, b) in zip(SHARES, stacks)], 1)  # [out, r_1 + ... + r_m]
        right = np.concatenate([a for a, _ in stacks])
        here.d = here.d + left @ right
    return here


def hetlora(ranks: tuple[int, ...]) -> ByHand:
    here = ByHand()
    for _ in range(ROUNDS):
        replies = [here.train(k, here.a[:r], here.b[:, :r]) for k, r in enumerate(ranks)]
        sizes = np.array([np.linalg.norm(b @ a) for a, b in replies])
        here.a, here.b = np.zeros((RANK, IN)), np.zeros((OUT, RANK))
        for share, rank, (a, b) in zip(sizes / sizes.sum(), ranks, replies):
            here.a[:rank] += share * a
            here.b[:, :rank] += share * b
    return here


def assert_close(got: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lane", LANES)
def test_fedit_averages_the_factors(lane: str) -> None:
    params, here = trained(cs.fedit(**USUAL), layer(), lane=lane)[-1].model["params"], fedit()
    assert_close(params[A], here.a)
    assert_close(params[B], here.b)


@pytest.mark.parametrize("lane", LANES)
def test_ffa_lora_trains_b_alone_and_its_average_is_that_of_the_products(lane: str) -> None:
    rounds, here = trained(cs.ffa_lora(**USUAL), layer(), lane=lane), ffa_lora()
    assert set(rounds[-1].model["params"]) == {B}
    assert_close(rounds[-1].model["params"][B], here.b)
    replies = rounds[-1].cohort.reply["model"]["params"][B].numpy()
    products = np.einsum("k,koi->oi", SHARES, replies @ here.a)
    np.testing.assert_allclose(rounds[-1].model["params"][B].numpy() @ here.a, products, rtol=0, atol=1e-14)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("split", ["even", "b"])
@pytest.mark.parametrize("ranks", [None, (1, 3, 2, 2)])
def test_flexlora_gives_the_best_approximation_of_the_mean_product(lane: str, split: Any, ranks: Any) -> None:
    params = trained(cs.flexlora(**USUAL, ranks=ranks, split=split), layer(), lane=lane)[-1].model["params"]
    here = flexlora(split, *([ranks] if ranks else []))
    assert_close(params[B] @ params[A], here.b @ here.a)
    sign = np.sign(np.take_along_axis(here.a, np.abs(here.a).argmax(1, keepdims=True), 1))
    assert_close(params[A], here.a * sign)
    assert_close(params[B], here.b * sign.T)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ranks", [None, (1, 3, 2, 2)])
def test_flora_is_exact(lane: str, ranks: Any) -> None:
    algorithm = cs.flora(**USUAL, ranks=ranks)
    rounds = trained(algorithm, layer(), lane=lane)
    first = [ByHand().a, *(done.snapshot.server["a"][A].numpy() for done in rounds[:-1])]
    assert all(abs(one - other).max() > 0.01 for one, other in pairwise(first))  # a new A in every round
    here = flora(first, *([ranks] if ranks else []))
    assert np.linalg.matrix_rank(here.d) > RANK  # more than one adapter could hold
    assert_close(rounds[-1].model["buffers"][MERGED], here.d)
    # the model computes with what was merged, and so does one whose weights were changed
    task = algorithm.prepared(Task(layer(), "regression"))
    module = task.trained(rounds[-1].model)
    x = rows()[0][0]
    expected = x.numpy() @ (here.w + SCALING * here.d).T + here.bias
    folded = adapters.folded(module)
    assert_close(module(x).detach(), expected)
    assert_close(folded(x).detach(), expected)
    assert MERGED not in dict(folded.named_buffers()) and not folded._forward_hooks
    assert_close(folded.base_layer.weight.detach(), here.w + SCALING * here.d)  # type: ignore[union-attr]


def test_hetlora_fills_up_with_zeros_and_weighs_by_size() -> None:
    ranks = (1, 3, 2, 2)
    params, here = trained(cs.hetlora(**USUAL, ranks=ranks), layer())[-1].model["params"], hetlora(ranks)
    assert_close(params[A], here.a)
    assert_close(params[B], here.b)


# --- different ranks -------------------------------------------------------------------------------------------------

SCAFFOLD: dict[str, Any] = {
    "terms": (Linear(received="control_variate", remembered="control_variate"),),
    "memory": (ControlVariate(),),
    "ledgers": (ControlVariates(),),
    "weighting": UniformWeights(),
}


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"optimiser": "adam"},
        {"terms": (Proximal(mu=0.3),)},
        SCAFFOLD,
    ],
    ids=["sgd", "momentum", "adam", "fedprox", "scaffold"],
)
def test_a_client_of_rank_2_among_others_has_the_numbers_of_a_model_of_rank_2(lane: str, options: Any) -> None:
    """The first of two clients, in a model of rank 8 and in one of rank 2 with the same scaling."""
    draw = torch.Generator().manual_seed(1)
    large, small = (LoRALinear(nn.Linear(IN, OUT), rank, SCALING * rank).double() for rank in (8, 2))
    b = 0.1 * torch.randn(OUT, 8, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        large.lora_B.weight.copy_(b)
        small.base_layer.load_state_dict(large.base_layer.state_dict())
        small.lora_A.weight.copy_(large.lora_A.weight[:2])
        small.lora_B.weight.copy_(b[:, :2])
    usual = {**USUAL, "lr": 0.05, **options}
    whole = trained(cs.hetlora(**usual, ranks=(2, 8)), large, lane=lane, rounds=1, data=rows((5, 5)))[0]
    alone = trained(cs.fedit(**usual), small, lane=lane, rounds=1, data=rows((5, 5)))[0]
    got, expected = (one.cohort.reply["model"]["params"] for one in (whole, alone))
    assert tiny.gap({"a": got[A][0, :2], "b": got[B][0, :, :2]}, {"a": expected[A][0], "b": expected[B][0]}) <= 1e-14
    assert not bool(got[A][0, 2:].any()) and not bool(got[B][0, :, 2:].any())
    assert bool(got[A][1, 2:].all()) and bool(got[B][1, :, 2:].all())
    if "memory" in options:  # what it remembers is that of the smaller model, too
        kept, other = (one.snapshot.memory["client"]["control_variate"] for one in (whole, alone))
        assert tiny.gap({"a": kept[A][0, :2]}, {"a": other[A][0]}) <= 1e-14
        assert not bool(kept[A][0, 2:].any())


def test_noise_beyond_a_clients_rank_is_taken_off_by_the_server() -> None:
    noisy = cs.hetlora(**USUAL, ranks=(1, 2, 1, 1), channel={"name": "noise", "deviation": 0.1})
    params = trained(noisy, layer(), rounds=1)[0].model["params"]
    assert not bool(params[A][2:].any()) and bool(params[A][:2].all())


def test_ranks_that_do_not_fit_are_refused() -> None:
    one, other = (trained(cs.flora(**USUAL, ranks=ranks), layer())[-1] for ranks in ((1, 2), (1, 2, 1, 2)))
    assert tiny.same(one.model, other.model)  # repeated over the clients
    with pytest.raises(Invalid, match=r"a client has rank 4, but the model's adapters have at most 3"):
        trained(cs.flexlora(ranks=(1, 2, 4, 1)), layer())
    with pytest.raises(Invalid, match=r"ranks is empty"):
        cs.flexlora(ranks=())


# --- decompositions --------------------------------------------------------------------------------------------------


def test_the_decomposition_of_stacked_factors_is_that_of_their_product() -> None:
    draw = torch.Generator().manual_seed(0)
    for inner in (2, 30):  # fewer and more than the sides
        b = torch.randn(7, inner, generator=draw, dtype=torch.float64)
        a = torch.randn(inner, 9, generator=draw, dtype=torch.float64)
        u, s, vh = svd_of_product(b, a)
        np.testing.assert_allclose((u * s @ vh).numpy(), (b @ a).numpy(), atol=1e-12)
        np.testing.assert_allclose(s.numpy(), np.linalg.svd((b @ a).numpy())[1][: len(s)], atol=1e-12)


def test_directions_that_nobody_uses_keep_the_a_that_was_broadcast() -> None:
    before = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 4)
    nothing = torch.zeros(3, 1, dtype=torch.float64)
    a, b = truncated(*svd_of_product(nothing, nothing.new_zeros(1, 4)), before, "even")
    assert torch.equal(a, before) and not bool(b.any())
    one = torch.tensor([[0.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    a, b = truncated(*svd_of_product(nothing + 1, one), before, "even")  # of rank 1
    assert torch.equal(a[1], before[1]) and not bool(b[:, 1].any())
    np.testing.assert_allclose((b @ a).numpy(), (nothing + 1) @ one, atol=1e-14)


def test_a_robust_rule_sees_products() -> None:
    """Factors that were multiplied by -1 have the same product: a rule that looked at factors would drop them."""
    params = trained(cs.fedit(**USUAL), layer(), rounds=1)[0].cohort.reply["model"]["params"]
    mirrored = {
        name: torch.where(torch.tensor([1, 0, 0, 0], dtype=torch.bool)[:, None, None], -v, v)
        for name, v in params.items()
    }
    equal = torch.full((4,), 0.25, dtype=torch.float64)
    rule = cs.flexlora(combine="median").server.combine
    assert isinstance(rule, Redecomposed)
    models = [{"params": given, "buffers": {}} for given in (params, mirrored)]
    one, other = (rule.merge_around(model, equal, tree.rows(models[0], 1))["params"] for model in models)
    assert tiny.gap(one, other) <= 1e-12
    middle = np.median((params[B] @ params[A]).numpy(), 0)  # an even number: the mean of the two in the middle
    u, s, vh = np.linalg.svd(middle)
    assert_close(one[B] @ one[A], u[:, :RANK] * s[:RANK] @ vh[:RANK])


# --- which leaves are adapters ---------------------------------------------------------------------------------------


def test_pairs_are_found_by_their_names() -> None:
    names = ["enc.0.lora_A.default.weight", "enc.0.lora_B.default.weight", "fc.lora_A", "fc.lora_B", "head.weight"]
    assert pairs_in(names) == (Pair("enc.0", *names[:2]), Pair("fc", *names[2:4]))
    assert pairs_in(["lora_A", "lora_B"]) == (Pair("", "lora_A", "lora_B"),)
    assert pairs_in(["down.w", "up.w"], ("down", "up")) == (Pair("", "down.w", "up.w"),)
    assert pairs_in(["x.lora_A", "y.lora_B"]) == () == pairs_in(["x.same"], ("same", "same"))


def test_models_without_adapters_are_refused_with_the_fix() -> None:
    for name in ("fedit", "ffa_lora", "flora", "flexlora"):
        algorithm = getattr(cs, name)()
        with pytest.raises(Invalid, match=r"the model has no adapters: .* 1\.weight, .* peft\.get_peft_model"):
            algorithm.prepared(Task(tiny.mlp()))
        with pytest.raises(Invalid, match=r"the model has no adapters|algorithm\.prepared\(task\)"):
            list(run(algorithm, tiny.engine(tiny.mlp), rounds=1))
    wrong = {"x.lora_A": torch.zeros(2, 3, 1, 1), "x.lora_B": torch.zeros(4, 2, 1, 1)}
    with pytest.raises(Invalid, match=r"the adapter of x must be matrices .* adapt linear layers only"):
        pairs_of(wrong)


@pytest.mark.parametrize("name", ["ffa_lora", "flora"])
def test_an_engine_with_the_model_in_another_form_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match=r"give the engine algorithm\.prepared\(task\)"):
        list(run(getattr(cs, name)(), tiny.engine(tiny.lora_mlp), rounds=1))


class Own(nn.Module):
    """A layer with adapters under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(36, 3).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 36) / 6), nn.Parameter(torch.zeros(3, 2))
        self.scaling = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(x) + self.scaling * x @ self.down.T @ self.up.T


@pytest.mark.parametrize("name", ["fedit", "ffa_lora", "flora", "flexlora"])
def test_adapters_may_have_other_names(name: str) -> None:
    algorithm = getattr(cs, name)(lr=0.1, factors=("down", "up"))
    module = tiny.seeded(lambda: nn.Sequential(nn.Flatten(), Own())).double()
    engine = {"device": "cpu", "dtype": "float64", "lane": "serial"}
    result = cs.train(module, tiny.federation(), algorithm, rounds=2, progress=False, **engine)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    own = Own()
    del own.scaling
    if name == "flora":
        with pytest.raises(Invalid, match=r"Own has no number `scaling`"):
            algorithm.prepared(Task(own))


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_factors() -> None:
    """36 x 8 and 8 x 8 with rank 2, a head of 8 x 3 + 3; float64 numbers, and the loss in a reply."""
    a, b, head, dense = 2 * (36 + 8), 2 * (8 + 8), 8 * 3 + 3, 36 * 8 + 8 * 8
    expected = {
        "fedit": (a + b + head, a + b + head),
        "ffa_lora": (b + head, b + head),
        "flexlora": (a + b + head, a + b + head),
        "flora": (a + b + head, a + b + head + dense),
    }
    for name, (up, down) in expected.items():
        algorithm = getattr(cs, name)()
        module = tiny.module_for(algorithm, tiny.lora_mlp)
        done: Round = next(run(algorithm, tiny.engine(functools.partial(nn.Sequential, module)), rounds=1))
        assert (done.bytes_up, done.bytes_down) == (5 * 8 * (up + 1), 5 * 8 * down), name


def test_what_the_user_gave_is_not_changed() -> None:
    module = tiny.lora_mlp()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for name in ("ffa_lora", "flora"):
        task = getattr(cs, name)().prepared(Task(module))
        assert task.module is not module
        frozen = {name: value for name, value in task.module.named_parameters() if "base_layer" in name}
        assert all(value is dict(module.named_parameters())[name] for name, value in frozen.items())  # they exist once
    assert all(value.requires_grad for name, value in module.named_parameters() if "lora_A" in name)
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
