"""SimProx's options: each against a plain NumPy version of what it says, and at its limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.simprox import simprox
from consilience.client.memory.models import PreviousModel
from consilience.core.exchange import Cohort, Notes
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.environments.environment import Environment
from consilience.selection import Everyone, SlidingWindow
from consilience.server import SimProxWeights


def cohort_of(w: np.ndarray, dtype: torch.dtype = torch.float64, **more: Any) -> Cohort:
    """Models [m, d] cut into two tensors."""
    stacked, m = torch.from_numpy(np.asarray(w)).to(dtype), len(w)
    reply = {"model": {"params": {"a": stacked[:, :1], "b": stacked[:, 1:]}, "buffers": {}}, **more.pop("reply", {})}
    ones = torch.ones(m, dtype=torch.float64)
    return Cohort(reply=reply, ids=np.arange(m), examples=ones, steps=np.ones(m, np.int64), round=0, **more)


def weigh(
    w: np.ndarray, w_global: np.ndarray, cohort: Cohort | None = None, **options: Any
) -> tuple[np.ndarray, Notes]:
    anchor = torch.from_numpy(np.asarray(w_global))
    model = {"params": {"a": anchor[:1], "b": anchor[1:]}, "buffers": {}}
    weights, _, notes = SimProxWeights(**options).weigh(cohort or cohort_of(w), model, {})
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12) and weights.dtype == torch.float64
    return weights.numpy(), notes


def clients(seed: int, m: int = 6, size: int = 40, least: float = 0.2, most: float = 3.0) -> Any:
    draw = np.random.default_rng(seed)
    w_global, ways = draw.normal(size=size), draw.normal(size=(m, size))
    moves = draw.uniform(least, most, m)
    return w_global + moves[:, None] * ways / np.linalg.norm(ways, axis=1, keepdims=True), w_global


def literal(w: np.ndarray, w_global: np.ndarray, **options: Any) -> np.ndarray:
    """The final weights, pair by pair, of the options given."""
    o = {"lambda_0": 0.7, "tau": 0.5, "softmax": True, "temperature": None, "g": None, "scaled_norms": False} | options
    m, norm = len(w), np.linalg.norm
    updates = w - w_global
    seen = updates if o.get("compare_on") == "updates" else w
    target = updates.mean(0) if o.get("compare_on") == "updates" else w_global

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / (norm(a) * norm(b))) if norm(a) > 0 and norm(b) > 0 else 0.0

    sigma = sum(norm(w[i] - w[j]) for i in range(m) for j in range(i)) / math.comb(m, 2)
    s_bar = sum(cosine(v, target) for v in seen) / m
    share = o["lambda_0"] * max(s_bar, 0) / o["tau"] if s_bar < o["tau"] else o["lambda_0"]
    share = {"cosine": 1.0, "gaussian": 0.0}.get(o.get("similarity", "both"), share)
    g = norm(updates, axis=1) if o["g"] is None else o["g"]
    g = g / math.sqrt(w.shape[1]) if o["scaled_norms"] else g
    alpha = np.zeros(m)
    for i in range(m):
        mean = 0.0
        for j in range(m):
            if j != i:
                mean += share * cosine(seen[i], seen[j]) / (m - 1)
                mean += (1 - share) * math.exp(-(norm(w[i] - w[j]) ** 2) / (2 * sigma**2)) / (m - 1)
        alpha[i] = math.exp(-g[i]) * (1 + mean)
    alpha /= alpha.sum()
    if o["temperature"] is not None:
        return alpha ** (1 / o["temperature"]) / (alpha ** (1 / o["temperature"])).sum()
    return np.exp(alpha) / np.exp(alpha).sum() if o["softmax"] else alpha


@given(
    st.integers(0, 2**31),
    st.integers(2, 7),
    st.sampled_from(["both", "cosine", "gaussian"]),
    st.sampled_from(["weights", "updates"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.3, 1.0, 5.0]),
    st.floats(0.05, 1.0),
)
def test_all_options_together(
    seed: int, m: int, similarity: Any, compare_on: Any, scaled: bool, softmax: bool, temperature: Any, tau: float
) -> None:
    w, w_global = clients(seed, m)
    options = {"similarity": similarity, "compare_on": compare_on, "scaled_norms": scaled, "temperature": temperature}
    if temperature is None:  # which would replace the softmax
        options["softmax"] = softmax
    if similarity == "both":
        options["tau"] = tau
    got, _ = weigh(w, w_global, **options)
    np.testing.assert_allclose(got, literal(w, w_global, **options), rtol=0, atol=1e-11)


def test_by_hand() -> None:
    """Three updates in the plane, (1, 0), (0, 1) and (-1, 0), around a model far away along a third axis."""
    w_global = np.array([0.0, 0.0, 100.0])
    w = w_global + np.array([[1.0, 0, 0], [0, 1, 0], [-1, 0, 0]])
    # cosines 0, -1, 0: rows' means are -1/2, 0, -1/2, so alpha ~ 1/2, 1, 1/2
    got, _ = weigh(w, w_global, compare_on="updates", similarity="cosine", softmax=False)
    np.testing.assert_allclose(got, [0.25, 0.5, 0.25], atol=1e-14)
    # the mean update is (0, 1/3): cosines to it are 0, 1, 0, so lambda = 0.7 (1/3) / 0.5
    _, notes = weigh(w, w_global, compare_on="updates")
    assert float(notes["lambda"]) == pytest.approx(0.7 / 1.5, abs=1e-14)
    # of whole weights all cosines are near 1: lambda is lambda_0 and similarity hardly differs
    _, notes = weigh(w, w_global)
    assert float(notes["lambda"]) == 0.7
    got, _ = weigh(w, w_global, similarity="cosine", softmax=False)
    assert np.ptp(got) < 1e-4


def test_similarity_of_updates_bites_where_whole_weights_do_not() -> None:
    draw = np.random.default_rng(0)
    w_global, way = 3 * draw.normal(size=500), draw.normal(size=500) / 500**0.5
    w = w_global + np.stack([way + 0.1 * draw.normal(size=500) / 500**0.5 for _ in range(5)] + [-way])
    options = {"similarity": "cosine", "softmax": False, "scaled_norms": True}
    whole, _ = weigh(w, w_global, **options)
    updates, _ = weigh(w, w_global, compare_on="updates", **options)
    assert whole[5] / whole[0] > 0.99 and updates[5] / updates[0] < 0.05


def test_temperature_has_its_limits() -> None:
    w, w_global = clients(1)
    alpha = weigh(w, w_global, softmax=False)[0]
    np.testing.assert_allclose(weigh(w, w_global, temperature=1.0)[0], alpha, atol=1e-15)
    np.testing.assert_allclose(weigh(w, w_global, temperature=1e9)[0], 1 / 6, atol=1e-8)
    for cold in (1e-6, 1e-300):
        assert weigh(w, w_global, temperature=cold)[0].tolist() == (alpha == alpha.max()).astype(float).tolist()
    flat = [np.ptp(weigh(w, w_global, temperature=t)[0]) for t in (0.1, 0.5, 1, 2, 10)]
    assert flat == sorted(flat, reverse=True)
    assert weigh(w, w_global, temperature=0.2)[0].max() / weigh(w, w_global, temperature=0.2)[0].min() > math.e


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("g", [104.0, 746.0, 1e6])
def test_row_20_temperature_survives_underflow(temperature: float, g: float) -> None:
    w, w_global = clients(2, 5, least=g, most=g + 2)
    got, _ = weigh(w, w_global, temperature=temperature)
    assert np.isfinite(got).all() and got.argmax() == np.linalg.norm(w - w_global, axis=1).argmin()


def test_scaled_norms_divide_by_the_root_of_the_parameters() -> None:
    w, w_global = clients(3, 4, 64)
    _, notes = weigh(w, w_global, scaled_norms=True)
    np.testing.assert_allclose(notes["movement"], np.linalg.norm(w - w_global, axis=1) / 8, rtol=1e-13)
    assert not SimProxWeights().scaled_norms
    wide = np.repeat(w, 100, axis=1)  # a hundred times the parameters: the root mean square change stays
    _, again = weigh(wide, np.repeat(w_global, 100), scaled_norms=True)
    np.testing.assert_allclose(again["movement"], notes["movement"], rtol=1e-12)


# --- rows 18, 19, 21, 26, 28 of the fault table ----------------------------------------------------------------------


@pytest.mark.parametrize("similarity", ["both", "cosine"])
def test_row_18_zero_updates_have_similarity_zero_and_are_counted(similarity: Any) -> None:
    w, w_global = clients(4, 4)
    w[1] = w[2] = w_global
    got, notes = weigh(w, w_global, compare_on="updates", similarity=similarity)
    np.testing.assert_allclose(
        got, literal(w, w_global, compare_on="updates", similarity=similarity), rtol=0, atol=1e-12
    )
    assert int(notes["zero_updates"]) == 2 and bool(notes["similarity"].isfinite().all())
    if similarity == "cosine":
        assert notes["similarity"][1].tolist() == [0.0] * 4
    _, moved = weigh(*clients(4, 4), compare_on="updates")
    assert int(moved["zero_updates"]) == 0


def test_row_18_updates_from_a_model_of_zeros_are_comparable() -> None:
    """Whole models are not: a model of zeros has no direction (S0-7)."""
    w, _ = clients(5, 3)
    got, _ = weigh(w, np.zeros(40), compare_on="updates")
    np.testing.assert_allclose(got, literal(w, np.zeros(40), compare_on="updates"), rtol=0, atol=1e-12)
    with pytest.raises(Invalid, match="the global model is all zeros"):
        weigh(w, np.zeros(40))
    weigh(w, np.zeros(40), similarity="gaussian")  # asks for no direction


def test_updates_that_cancel_have_no_common_direction() -> None:
    w, w_global = clients(6, 2)
    both = np.stack([w[0], 2 * w_global - w[0]])
    _, notes = weigh(both, w_global, compare_on="updates")
    assert float(notes["lambda"]) == 0.0


@pytest.mark.parametrize("compare_on", ["weights", "updates"])
@pytest.mark.parametrize("sketch", [None, 16])
@pytest.mark.parametrize("temperature", [None, 0.01])
def test_row_19_identical_clients_weigh_exactly_the_same(compare_on: Any, sketch: Any, temperature: Any) -> None:
    w, w_global = clients(7, 1)
    got, notes = weigh(np.repeat(w, 7, 0), w_global, compare_on=compare_on, sketch=sketch, temperature=temperature)
    assert got.tolist() == [1 / 7] * 7 and bool(notes["all_alike"])
    still, notes = weigh(np.repeat(w_global[None], 3, 0), w_global, compare_on=compare_on, sketch=sketch)
    assert still.tolist() == [1 / 3] * 3 and int(notes["zero_updates"]) == 3


@pytest.mark.parametrize("compare_on", ["weights", "updates"])
def test_row_21_huge_float32_entries(compare_on: Any) -> None:
    w, w_global = clients(8, 4, 20)
    anchor = torch.from_numpy(1e30 * w_global).float()
    model = {"params": {"a": anchor[:1], "b": anchor[1:]}, "buffers": {}}
    _, _, big = SimProxWeights(compare_on=compare_on).weigh(cohort_of(1e30 * w, torch.float32), model, {})
    _, small = weigh(w, w_global, compare_on=compare_on)
    torch.testing.assert_close(big["similarity"], small["similarity"], rtol=0, atol=1e-5)


@given(st.integers(0, 2**31), st.permutations(range(6)), st.sampled_from([None, 32]))
def test_row_26_order_does_not_matter(seed: int, order: list[int], sketch: Any) -> None:
    w, w_global = clients(seed)
    for compare_on in ("weights", "updates"):
        got, expected = (weigh(v, w_global, compare_on=compare_on, sketch=sketch)[0] for v in (w[order], w))
        np.testing.assert_allclose(got, expected[order], rtol=0, atol=1e-12)


def test_row_28_one_client_weighs_one() -> None:
    w, w_global = clients(1, 1)
    for options in ({"compare_on": "updates"}, {"temperature": 0.1}, {"sketch": 8}, {"similarity": "cosine"}):
        assert weigh(w, w_global, **options)[0].tolist() == [1.0]


# --- a client's own previous model -----------------------------------------------------------------------------------


def test_prev_own_takes_the_reported_distance() -> None:
    w, w_global = clients(9, 4)
    g = np.array([0.1, 5.0, 1.0, 2.0])
    cohort = cohort_of(w, reply={"moved": torch.from_numpy(g)})
    got, notes = weigh(w, w_global, cohort, previous_model="own")
    np.testing.assert_allclose(got, literal(w, w_global, g=g), rtol=0, atol=1e-12)
    assert notes["movement"].tolist() == g.tolist()
    scaled, _ = weigh(w, w_global, cohort, previous_model="own", scaled_norms=True)
    np.testing.assert_allclose(scaled, literal(w, w_global, g=g, scaled_norms=True), rtol=0, atol=1e-12)


def test_previous_own_model_measures_silent_clients_from_the_broadcast_model() -> None:
    w, w_global = clients(9, 3)
    w[1] = w_global
    said = torch.tensor([0.5, 77.0, 1.5], dtype=torch.float64)
    cohort = cohort_of(w, reply={"moved": said}, heard=np.array([True, False, True]))
    assert weigh(w, w_global, cohort, previous_model="own")[1]["movement"].tolist() == [0.5, 0.0, 1.5]


def test_prev_own_without_the_report_is_refused() -> None:
    with pytest.raises(Invalid, match=r"needs to know how far clients moved .* PreviousModel\(report=True\)"):
        weigh(*clients(0), previous_model="own")
    with pytest.raises(
        Invalid, match="SimProxWeights reads 'moved' in the replies, which no memory of the client adds"
    ):
        fedavg(weighting=SimProxWeights(previous_model="own"))
    own = simprox(previous_model="own")
    assert simprox(weighting=SimProxWeights(previous_model="own")) == own
    assert simprox(previous_model="own", memory=(PreviousModel(),)) == own  # not two memories of one name


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_prev_own_in_a_run(lane: str) -> None:
    """First the broadcast model, then the client's own last one, many rounds old with a sliding window."""
    algorithm = simprox(previous_model="own", batch_size=4, lr=0.1, selection=SlidingWindow(fraction=0.4))
    engine = tiny.engine(tiny.convnet, lane=lane, environment=Environment(communication=0.8, silent="broadcast_model"))
    last: dict[int, torch.Tensor] = {}
    before, returned = engine.start(), 0
    for one in run(algorithm, engine, rounds=9, seed=5):
        params = one.cohort.reply["model"]["params"]
        flat = torch.cat([value.flatten(1) for value in params.values()], 1)
        sent = torch.cat([value.flatten() for value in before["params"].values()])
        for row, client in enumerate(one.cohort.ids.tolist()):
            if one.cohort.heard is not None and not one.cohort.heard[row]:
                continue
            returned += client in last
            expected = (flat[row] - last.get(client, sent)).norm()
            torch.testing.assert_close(one.cohort.reply["moved"][row], expected, rtol=1e-12, atol=1e-14)
            last[client] = flat[row]
        before = one.model
    assert returned >= 4
    kept = one.snapshot.memory["client"]["previous"]
    assert kept["known"].tolist() == [client in last for client in range(5)]
    for client, own in last.items():
        assert torch.equal(torch.cat([v[client].flatten() for v in kept["model"]["params"].values()]), own)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "options",
    [
        {"compare_on": "updates"},
        {"temperature": 0.5},
        {"sketch": 64},
        {"similarity": "cosine"},
        {"previous_model": "own"},
    ],
    ids=str,
)
def test_options_run_and_lanes_agree(options: dict[str, Any]) -> None:
    def last(lane: str) -> Any:
        *_, one = run(simprox(batch_size=4, selection=Everyone(), **options), tiny.engine(lane=lane), rounds=3)
        return one.model

    assert tiny.gap(last("batched"), last("serial")) <= 1e-12
    assert eval(repr(SimProxWeights(**options)), {"SimProxWeights": SimProxWeights}) == SimProxWeights(**options)


# --- the seam for buffered asynchronous SimProx ----------------------------------------------------------------------


def test_weights_of_updates_depend_on_the_updates_alone() -> None:
    """A buffer re-bases each stale reply on the present model, w + (w_i - what i was sent): same weights."""
    w, w_global = clients(10)
    elsewhere = w_global + 7.0
    for options in ({"compare_on": "updates"}, {"similarity": "gaussian"}):
        got = weigh(w - w_global + elsewhere, elsewhere, **options)[0]
        np.testing.assert_allclose(got, weigh(w, w_global, **options)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, r"SimProxWeights.temperature = 0.0 is out of range: it must be > 0"),
        ({"previous_model": "mine"}, r"SimProxWeights.previous_model = 'mine' is not one of global, own"),
        ({"similarity": "cosin"}, r"not one of both, cosine, gaussian \(did you mean 'cosine'\?\)"),
        ({"compare_on": "update"}, r"SimProxWeights.compare_on = 'update' is not one of weights, updates"),
        ({"sketch": 0}, r"SimProxWeights.sketch = 0 is out of range: it must be >= 1"),
        ({"scaled_norms": 1}, r"SimProxWeights.scaled_norms = 1 must be true or false"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        SimProxWeights(**options)
