"""What happens to a reply in transit: exact packing, right means, nothing lost, every lane and every resume alike."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedper import fedper
from consilience.algorithms.simprox import simprox
from consilience.channel import Chain, Clip, Noise, OverTheAir, Plain, Quantise, Radio, RandomK, TopK
from consilience.channel.quantise import packed, unpacked
from consilience.core import rng, tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.protocols import Channel
from consilience.core.rng import exponentials, normals, uniforms
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.environments.environment import Environment
from consilience.options import parts
from consilience.selection import Uniform

pytestmark = pytest.mark.usefixtures("untraced")

CHANNELS: dict[str, Any] = {
    "clip": Clip(bound=0.05),
    "noise": Noise(deviation=0.01),
    "quantise": Quantise(bits=4),
    "top_k": TopK(fraction=0.1),
    "top_k_forgetful": TopK(fraction=0.1, feedback=False),
    "random_k": RandomK(fraction=0.1),
    "random_k_unbiased": RandomK(fraction=0.1, feedback=False),
    "radio": Radio(snr_db=10.0, fading="rayleigh"),
    "over_the_air": OverTheAir(snr_db=10.0, fading="rayleigh"),
    "chain": Chain(channels=(Clip(bound=0.1), Noise(deviation=0.001), TopK(fraction=0.2), Quantise(bits=6))),
    "analogue": Chain(channels=(TopK(fraction=0.2), Radio(snr_db=10.0))),
    "seeded": Chain(channels=(RandomK(fraction=0.2), Quantise(bits=2))),
}
each_channel = pytest.mark.parametrize("name", CHANNELS)

SHAPES = {"a": (3, 5), "b": (), "c": (7,), "d": (2, 2, 2)}
SIZE = 31


def model(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    params = {n: (scale * torch.randn(s, generator=draw, dtype=torch.float64)).to(dtype) for n, s in SHAPES.items()}
    return {"params": params, "buffers": {"count": torch.tensor(7 + seed), "mean": torch.randn(4, generator=draw)}}


def through(
    channel: Any, replies: list[Tree], start: Tree, memories: list[Tree] | None = None, seed: int = 0, **cohort: Any
) -> tuple[Cohort, Cohort, list[Tree]]:
    """(as sent, as received, memories) of clients with ids 0, 1, ... in a round whose keys come from `seed`."""
    memories = memories or [channel.init(start)] * len(replies)
    message = {"model": start, "round": torch.tensor(0)}
    done = [
        channel.encode(reply, message, memory, torch.tensor(rng.key(seed, "channel", i)))
        for i, (reply, memory) in enumerate(zip(replies, memories))
    ]
    m = len(replies)
    sent = Cohort(
        reply=tree.stack([reply for reply, _ in done]),
        ids=np.arange(m),
        examples=torch.ones(m, dtype=torch.float64),
        steps=np.ones(m, dtype=np.int64),
        round=0,
        **cohort,
    )
    got = channel.decode(sent, Broadcast(shared={"model": start}), rng.key(seed, "decode"))
    return sent, got, [memory for _, memory in done]


def flat(params: Tree) -> torch.Tensor:
    return torch.cat([leaf.flatten() for leaf in params.values()])


def moved(got: Cohort, start: Tree, client: int = 0) -> torch.Tensor:
    return flat(tree.rows(got.reply["model"]["params"], client)) - flat(start["params"])


# --- all of them -----------------------------------------------------------------------------------------------------


@each_channel
def test_models_come_back_and_the_rest_passes(name: str) -> None:
    start = model(0)
    replies = [{"model": model(i), "loss": torch.tensor(float(i)), "extra": {"c": torch.ones(3) * i}} for i in (1, 2)]
    copies = tree.clone({"0": replies[0], "1": replies[1], "start": start})
    _, got, _ = through(CHANNELS[name], replies, start)
    assert tiny.structure(tree.rows(got.reply, 0)) == tiny.structure(replies[0])
    for i in (0, 1):
        assert tiny.same(tree.rows(got.reply["model"]["buffers"], i), replies[i]["model"]["buffers"])
        assert tiny.same(tree.rows(got.reply["extra"], i), replies[i]["extra"])
        assert got.reply["loss"][i] == i + 1
    assert tiny.finite(got.reply)
    assert tiny.same(copies, {"0": replies[0], "1": replies[1], "start": start})


@each_channel
@pytest.mark.parametrize("lane", ["batched", "streams"])
def test_lanes_agree(name: str, lane: str) -> None:
    """Uneven work, some clients unheard, batch norm; memories of what was not sent included."""
    world = Environment(steps=(5, 0, 1, 2, 3), communication=0.8, silent="broadcast_model")
    runs = []
    for where in ("serial", lane):
        engine = tiny.engine(tiny.convnet, lane=where, environment=world)
        runs.append(list(run(fedavg(lr=0.05, batch_size=4, channel=CHANNELS[name]), engine, rounds=3, seed=1)))
    for one, other in zip(*runs):
        assert tiny.gap(one.model, other.model) < 1e-12
        assert tiny.gap(one.snapshot.memory, other.snapshot.memory) < 1e-12
        assert one.bytes_up == other.bytes_up


@each_channel
def test_resume_is_exact(name: str) -> None:
    algorithm = fedavg(lr=0.05, batch_size=4, channel=CHANNELS[name], selection=Uniform(count=3))
    whole = list(run(algorithm, tiny.engine(), rounds=4, seed=1))
    held = whole[1].snapshot
    saved = dataclasses.replace(held, server=tree.clone(held.server), memory=tree.clone(held.memory))
    rest = list(run(algorithm, tiny.engine(), rounds=4, seed=1, resume=saved))
    assert tiny.same(rest[-1].model, whole[-1].model) and tiny.same(rest[-1].snapshot.memory, whole[-1].snapshot.memory)


@each_channel
def test_silent_clients_send_nothing_and_forget_nothing(name: str) -> None:
    """Where all are silent the model stays; where one is silent, what it remembers stays."""
    dead = Environment(communication=0.0, silent="broadcast_model")
    algorithm = fedavg(lr=0.05, batch_size=4, channel=CHANNELS[name])
    engine = tiny.engine(tiny.mlp, environment=dead)
    first = next(iter(run(algorithm, engine, rounds=1)))
    assert tiny.gap(first.model, engine.start()) < 1e-15
    assert all(bool((leaf == 0).all()) for leaf in tree.leaves(first.snapshot.memory))
    start, replies = model(0), [{"model": model(1)}, {"model": model(2)}]
    _, got, _ = through(CHANNELS[name], replies, start, heard=np.array([True, False]))
    if name != "over_the_air":
        assert float(moved(got, start, 1).abs().max()) == 0
    assert float(moved(got, start, 0).abs().max()) > 0


@each_channel
def test_an_empty_cohort_and_a_broken_client(name: str) -> None:
    start, bad = model(0), model(1)
    nobody = Cohort(
        reply={}, ids=np.empty(0, dtype=np.int64), examples=torch.empty(0), steps=np.empty(0, dtype=np.int64), round=0
    )
    assert len(CHANNELS[name].decode(nobody, Broadcast(shared={"model": start}), 3)) == 0
    for value in (math.nan, math.inf):
        bad["params"]["c"] = torch.full((7,), value, dtype=torch.float64)
        _, got, _ = through(CHANNELS[name], [{"model": bad}, {"model": model(2)}], start)
        finite = tree.all_finite(got.reply).tolist()
        assert not finite[0], "a broken reply must be seen to be broken"
        if name != "over_the_air":  # what the air adds up is broken for all
            assert finite[1]


@each_channel
def test_bytes_are_those_of_what_is_sent(name: str) -> None:
    sent, _, _ = through(CHANNELS[name], [{"model": model(i, dtype=torch.float32)} for i in range(3)], model(9))
    assert sent.nbytes() == sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(sent.reply))
    rest = 8 + 4 * 4  # the counter and the mean
    assert (
        sent.nbytes() // 3 - rest
        == {
            **dict.fromkeys(("clip", "noise", "radio", "over_the_air"), 8 * SIZE),  # differences to a float64 model
            "quantise": 4 * (2 + 1 + 1 + 1) + 4 * 8,  # groups of eight values: 15, 1, 7, 8; and four scales
            **dict.fromkeys(("top_k", "top_k_forgetful"), 3 * (8 + 4)),
            **dict.fromkeys(("random_k", "random_k_unbiased"), 3 * 8 + 8),
            "chain": 6 * 1 + 8 + 6 * 4,  # six values in one group of eight, six bits each; places
            "analogue": 6 * (8 + 4),
            "seeded": 2 * 1 + 8 + 8,
        }[name]
    )


@each_channel
def test_config_round_trip(name: str) -> None:
    written = parts.write(CHANNELS[name])
    assert parts.build("channel", written, Channel) == CHANNELS[name]


def test_what_clients_keep_at_home_is_not_sent() -> None:
    for name, channel in CHANNELS.items():
        engine = tiny.engine(tiny.mlp)
        start = engine.start()
        (one,) = run(fedper(lr=0.05, batch_size=4, channel=channel), engine, rounds=1)
        assert tiny.gap({"w": one.model["params"]["3.weight"]}, {"w": start["params"]["3.weight"]}) < 1e-15 or (
            name == "over_the_air"
        )


# --- packing and quantisation ----------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 2**31))
def test_packing_is_exact(bits: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (3, count), generator=torch.Generator().manual_seed(seed))
    octets = packed(codes, bits)
    assert octets.dtype == torch.uint8 and octets.shape == (3, bits * math.ceil(count / 8))
    back = unpacked(octets, bits)
    assert torch.equal(back[:, :count], codes) and bool((back[:, count:] == 0).all())
    # the same bits by hand: code i occupies bits i*b .. i*b+b-1 of a little-endian number
    for row, octet_row in zip(codes.tolist(), octets.tolist()):
        number = sum(code << (bits * i) for i, code in enumerate(row))
        assert bytes(octet_row) == number.to_bytes(len(octet_row), "little")


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_quantised_values_are_levels_next_to_the_true_ones(bits: int) -> None:
    start, reply = model(0), {"model": model(1)}
    _, got, _ = through(Quantise(bits=bits), [reply], start)
    for leaf, true, base in zip(
        *(tree.leaves(m["params"]) for m in (tree.rows(got.reply["model"], 0), reply["model"], start))
    ):
        update, scale = (leaf - base), (true - base).abs().max()
        spacing = 2 * scale / (2**bits - 2 if bits > 1 else 1)
        assert bool(((update - (true - base)).abs() <= spacing * (1 + 1e-12)).all())
        steps = (update + scale) / spacing
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-9)
        assert bool((update.abs() <= scale * (1 + 1e-12)).all())


def test_zero_stays_zero_and_the_largest_value_is_exact() -> None:
    start = model(0)
    reply = {"model": tree.clone(start)}
    _, got, _ = through(Quantise(bits=3), [reply], start)
    assert float(moved(got, start).abs().max()) == 0
    reply["model"]["params"]["c"] = start["params"]["c"] + torch.tensor([0, 0, 2.0, 0, -2.0, 0, 0])
    _, got, _ = through(Quantise(bits=3), [reply], start)
    assert tiny.gap(got.reply["model"]["params"], tree.stack([reply["model"]["params"]])) < 1e-14


def many(channel: Any, start: Tree, reply: Tree, times: int) -> Tree:
    """The same reply sent `times` times with fresh keys, as received: stacked parameters."""
    keys = rng.fold(torch.tensor(5), torch.arange(times))
    sent = torch.func.vmap(lambda key: channel.encode({"model": reply}, {"model": start}, {}, key)[0])(keys)
    rows, steps = torch.ones(times), np.ones(times, dtype=np.int64)
    cohort = Cohort(reply=sent, ids=np.arange(times), examples=rows, steps=steps, round=0)
    return channel.decode(cohort, Broadcast(shared={"model": start}), 0).reply["model"]["params"]


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_quantisation_is_right_on_average(bits: int) -> None:
    """4,000 draws: a value a share p above a level goes up with probability p, so its mean varies by
    spacing sqrt(p (1 - p) / 4000); none of 31 values is further away than 5 of these."""
    start, reply, times = model(0), model(1), 4000
    for name, stacked in many(Quantise(bits=bits), start, reply, times).items():
        update = reply["params"][name] - start["params"][name]
        scale = update.abs().max()
        spacing = 2 * scale / (2**bits - 2 if bits > 1 else 1)
        share = ((update + scale) / spacing) % 1
        allowed = 5 * spacing * (share * (1 - share) / times).sqrt() + 1e-12
        assert bool(((stacked.mean(0) - reply["params"][name]).abs() <= allowed).all()), name


def test_random_places_without_feedback_are_right_on_average() -> None:
    """A value v is n/k v with probability k/n: its mean varies by |v| sqrt((n/k - 1) / 4000), n/k = 31/7."""
    start, reply, times = model(0), model(1), 4000
    got = many(RandomK(fraction=0.25, feedback=False), start, reply, times)
    for name, stacked in got.items():
        update = reply["params"][name] - start["params"][name]
        allowed = 5 * update.abs() * math.sqrt((31 / 7 - 1) / times)
        assert bool(((stacked.mean(0) - reply["params"][name]).abs() <= allowed).all()), name


# --- sparse updates --------------------------------------------------------------------------------------------------


def test_top_k_by_hand() -> None:
    start = {"params": {"a": torch.zeros(2, 2), "b": torch.tensor([1.0, 1.0])}, "buffers": {}}
    reply = {
        "model": {
            "params": {"a": torch.tensor([[1.0, -4.0], [0.5, 2.0]]), "b": torch.tensor([4.0, 1.5])},
            "buffers": {},
        }
    }
    channel = TopK(fraction=0.34)  # 2 of 6
    sent, got, (memory,) = through(channel, [reply], start)
    assert sorted(sent.reply["model"]["params"]["places"][0].tolist()) == [1, 4]
    assert got.reply["model"]["params"]["a"][0].tolist() == [[0, -4], [0, 0]]
    assert got.reply["model"]["params"]["b"][0].tolist() == [4, 1]
    assert memory["rest"].tolist() == [1, 0, 0.5, 2, 0, 0.5]
    # the next update is small: what was left over is sent now
    still = {"model": {"params": {"a": torch.zeros(2, 2), "b": torch.tensor([1.0, 1.75])}, "buffers": {}}}
    _, got, (memory,) = through(channel, [still], start, [memory])
    assert got.reply["model"]["params"]["a"][0].tolist() == [[0, 0], [0, 2]]
    assert got.reply["model"]["params"]["b"][0].tolist() == [1, 2.25]
    assert memory["rest"].tolist() == [1, 0, 0.5, 0, 0, 0]


@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.1, 0.5, 1.0]), st.booleans())
def test_all_that_was_sent_and_the_rest_is_the_sum_of_the_updates(seed: int, fraction: float, random: bool) -> None:
    channel: Any = RandomK(fraction=fraction) if random else TopK(fraction=fraction)
    start, memory = model(0), None
    arrived, wanted = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for round in range(5):
        reply = model(seed + round + 1)
        _, got, (kept,) = through(channel, [{"model": reply}], start, memory and [memory], seed=seed + round)
        memory = kept
        arrived += moved(got, start)
        wanted += flat(reply["params"]) - flat(start["params"])
        torch.testing.assert_close(arrived + memory["rest"], wanted, rtol=0, atol=1e-12)


def test_error_feedback_repairs_what_sparse_updates_alone_cannot() -> None:
    """Two values of which the same one is always larger: without feedback the other one never arrives."""
    start = {"params": {"w": torch.zeros(2)}, "buffers": {}}
    reply = {"model": {"params": {"w": torch.tensor([1.0, 0.6])}, "buffers": {}}}
    sums = {}
    for feedback in (True, False):
        channel, memory, total = TopK(fraction=0.5, feedback=feedback), None, torch.zeros(2)
        for round in range(40):
            _, got, (memory,) = through(channel, [reply], start, memory and [memory], seed=round)
            total += got.reply["model"]["params"]["w"][0]
        sums[feedback] = (total / 40).tolist()
    assert sums[False] == [1, 0]
    assert sums[True] == pytest.approx([1, 0.6], abs=0.05)


def test_random_places_are_distinct_and_uniform() -> None:
    channel, start = RandomK(fraction=0.2, feedback=False), model(0)
    counts = torch.zeros(SIZE)
    for seed in range(600):
        _, got, _ = through(channel, [{"model": model(1)}], start, seed=seed)
        hit = moved(got, start) != 0
        assert int(hit.sum()) == 6
        counts += hit
    expected = 600 * 6 / SIZE
    assert float((counts - expected).abs().max()) < 5 * math.sqrt(expected * (1 - 6 / SIZE))


# --- clip and noise --------------------------------------------------------------------------------------------------


def test_clip_by_hand() -> None:
    start = {"params": {"a": torch.zeros(2), "b": torch.zeros(1)}, "buffers": {}}
    reply = {"model": {"params": {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}, "buffers": {}}}
    for bound, expected in ((1.0, [0.6, 0, 0.8]), (5.0, [3, 0, 4]), (9.0, [3, 0, 4])):
        _, got, _ = through(Clip(bound=bound), [reply], start)
        assert moved(got, start).tolist() == pytest.approx(expected, abs=1e-7)


def test_noise_has_its_deviation_and_is_fresh() -> None:
    start = {"params": {"w": torch.zeros(20_000, dtype=torch.float64)}, "buffers": {}}
    replies = [{"model": tree.clone(start)} for _ in range(2)]
    _, got, _ = through(Noise(deviation=0.3), replies, start)
    one, other = got.reply["model"]["params"]["w"]
    for values in (one, other):
        assert abs(float(values.mean())) < 5 * 0.3 / math.sqrt(20_000)
        assert float(values.std()) == pytest.approx(0.3, rel=5 / math.sqrt(2 * 20_000))
        assert float((values.abs() > 0.6).double().mean()) == pytest.approx(0.0455, abs=0.008)
    assert abs(float((one * other).mean())) < 5 * 0.09 / math.sqrt(20_000)
    _, again, _ = through(Noise(deviation=0.3), replies, start)
    assert torch.equal(again.reply["model"]["params"]["w"], got.reply["model"]["params"]["w"])
    _, later, _ = through(Noise(deviation=0.3), replies, start, seed=1)
    assert not torch.equal(later.reply["model"]["params"]["w"][0], one)


def test_draws() -> None:
    keys = rng.fold(torch.tensor(3), torch.arange(50))
    flat_draws = uniforms(keys, 400)
    assert float(flat_draws.min()) >= 0 and float(flat_draws.max()) < 1
    assert float(flat_draws.mean()) == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / 20_000))
    bell = normals(keys, 401)
    assert bell.shape == (50, 401)
    assert float((bell**4).mean()) == pytest.approx(3, abs=0.25)
    assert abs(float((bell[:, :200] * bell[:, 201:401]).mean())) < 0.05
    gains = exponentials(rng.fold(torch.tensor(4), torch.arange(20_000)))
    assert float(gains.mean()) == pytest.approx(1, abs=5 / math.sqrt(20_000))
    assert float((gains > 2).double().mean()) == pytest.approx(math.exp(-2), abs=0.012)


# --- radio -----------------------------------------------------------------------------------------------------------


def wide(clients: int, size: int = 4000) -> tuple[Tree, list[Tree]]:
    """Client k's update has root mean square 2^k."""
    draw = torch.Generator().manual_seed(0)
    start = {"params": {"w": torch.randn(size, generator=draw, dtype=torch.float64)}, "buffers": {}}
    replies = []
    for k in range(clients):
        update = torch.randn(size, generator=draw, dtype=torch.float64)
        update = update / update.square().mean().sqrt() * 2**k
        replies.append({"model": {"params": {"w": start["params"]["w"] + update}, "buffers": {}}})
    return start, replies


def errors(got: Cohort, replies: list[Tree]) -> torch.Tensor:
    return got.reply["model"]["params"]["w"] - torch.stack([reply["model"]["params"]["w"] for reply in replies])


def test_radio_noise_follows_each_clients_own_signal() -> None:
    start, replies = wide(3)
    _, got, _ = through(Radio(snr_db=20.0), replies, start)
    spread = errors(got, replies).square().mean(1).sqrt()
    assert (spread / torch.tensor([0.1, 0.2, 0.4])).tolist() == pytest.approx([1, 1, 1], rel=0.06)


def test_fading_is_drawn_for_every_client_and_bounded_by_the_floor() -> None:
    """|h|^2 is exponential: 2,000 of them, each measured to about 6 % by the noise it leaves."""
    start, replies = wide(20, 500)
    measured = []
    for seed in range(100):
        _, got, _ = through(Radio(snr_db=0.0, fading="rayleigh", min_gain=0.2), replies, start, seed=seed)
        measured.append(4.0 ** np.arange(20) / errors(got, replies).square().mean(1).numpy())
    gains = np.concatenate(measured)
    assert gains.min() > 0.2 * 0.75
    for beyond in (0.5, 1.0, 2.0):
        assert (gains > beyond).mean() == pytest.approx(math.exp(-beyond), abs=5 * math.sqrt(0.25 / 2000))
    assert abs(np.corrcoef(np.log(np.stack(measured)).T)[np.triu_indices(20, 1)]).mean() < 0.12


def test_over_the_air_the_mean_has_one_noise_and_more_clients_less() -> None:
    for clients in (2, 4):
        start, replies = wide(clients)
        _, got, _ = through(OverTheAir(snr_db=20.0), replies, start)
        error = errors(got, replies)
        assert float((error - error[0]).abs().max()) < 1e-12, "whatever the weights, the sum has the same noise"
        assert float(error[0].square().mean().sqrt()) == pytest.approx(0.1 * 2 ** (clients - 1) / clients, rel=0.06)


def test_over_the_air_silent_clients_do_not_send() -> None:
    start, replies = wide(3)
    _, got, _ = through(OverTheAir(snr_db=20.0), replies, start, heard=np.array([True, True, False]))
    silent = got.reply["model"]["params"]["w"][2] - start["params"]["w"]  # the stand-in, and the noise of the sum
    assert float(silent.square().mean().sqrt()) == pytest.approx(0.1 * 2 / 2, rel=0.06)


# --- combinations ----------------------------------------------------------------------------------------------------


def test_a_chain_of_one_with_its_keys_is_that_channel_and_order_matters() -> None:
    start, replies = wide(1)
    _, clipped, _ = through(Chain(channels=(Clip(bound=1.0), Noise(deviation=0.5))), replies, start)
    _, bounded, _ = through(Chain(channels=(Noise(deviation=0.5), Clip(bound=1.0))), replies, start)
    assert float(moved(bounded, start).norm()) == pytest.approx(1, abs=1e-12)
    assert float(moved(clipped, start).norm()) > 10
    _, alone, _ = through(Chain(channels=(Clip(bound=1.0),)), replies, start)
    _, plain, _ = through(Clip(bound=1.0), replies, start)
    assert tiny.same(alone.reply, plain.reply)


def test_channels_that_know_only_models_can_come_before_and_between() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Flip:
        """Sends the model on the other side of the one received."""

        def init(self, start: Tree) -> Tree:
            return {}

        def encode(self, reply: Tree, message: Tree, memory: Tree, key: torch.Tensor) -> tuple[Tree, Tree]:
            base = message["model"]["params"]
            params = {name: 2 * base[name] - value for name, value in reply["model"]["params"].items()}
            return {**reply, "model": {**reply["model"], "params": params}}, memory

        def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
            assert set(received.shared["model"]["params"]) == set(cohort.reply["model"]["params"])
            return cohort

    start, replies = wide(1)
    expected = -(flat(replies[0]["model"]["params"]) - flat(start["params"]))
    for channels in (
        (Flip(), Clip(bound=1e9)),
        (Clip(bound=1e9), Flip()),
        (Clip(bound=1e9), Flip(), TopK(fraction=1.0)),
    ):
        _, got, _ = through(Chain(channels=channels), replies, start)
        torch.testing.assert_close(moved(got, start), expected, rtol=0, atol=1e-12)
    with pytest.raises(Invalid, match="Flip cannot come behind TopK: it needs whole models; put it first"):
        Chain(channels=(TopK(), Flip()))


def test_personal_models_are_the_anchors_where_there_are_any() -> None:
    bases = [model(5), model(6)]
    for channel in (
        Clip(bound=1e9),
        Quantise(bits=8),
        TopK(fraction=1.0),
        Chain(channels=(RandomK(fraction=1.0), Noise(deviation=0.0))),
    ):
        replies = [model(1), model(2)]
        sent = tree.stack(
            [
                channel.encode({"model": r}, {"model": b}, channel.init(b), torch.tensor(i))[0]
                for i, (r, b) in enumerate(zip(replies, bases))
            ]
        )
        cohort = Cohort(reply=sent, ids=np.arange(2), examples=torch.ones(2), steps=np.ones(2, dtype=np.int64), round=0)
        received = Broadcast(shared={}, personal={"model": tree.stack(bases)})
        got = channel.decode(cohort, received, 0).reply["model"]["params"]
        gap = tiny.gap(got, tree.stack([r["params"] for r in replies]))
        assert gap < (0.05 if isinstance(channel, Quantise) else 1e-12)


@pytest.mark.parametrize("name", ["quantise", "top_k", "random_k", "chain"])
def test_compressed_training_still_learns(name: str) -> None:
    engine = tiny.engine(tiny.mlp, lane="batched")
    options: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    channel = {**CHANNELS, "chain": Chain(channels=(TopK(fraction=0.2), Quantise(bits=6)))}[name]
    losses, sizes = {}, {}
    for key, used in (("plain", Plain()), ("channel", channel)):
        rounds = list(run(fedavg(channel=used, **options), engine, rounds=12))
        losses[key], sizes[key] = float(rounds[-1].cohort.reply["loss"].mean()), rounds[-1].bytes_up
        first = float(rounds[0].cohort.reply["loss"].mean())
    assert losses["channel"] < 0.75 * first
    assert sizes["channel"] < 0.4 * sizes["plain"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Quantise(bits=0), "Quantise.bits = 0 is out of range: it must be >= 1 and <= 8"),
        (lambda: Quantise(bits=9), "Quantise.bits = 9 is out of range"),
        (lambda: TopK(fraction=0), "TopK.fraction = 0.0 is out of range: it must be > 0 and <= 1"),
        (lambda: Clip(bound=-1), "Clip.bound"),
        (lambda: Noise(deviation=math.nan), "Noise.deviation = nan is out of range"),
        (lambda: Radio(fading="rician"), "Radio.fading = 'rician' is not one of none, rayleigh"),  # type: ignore[arg-type]
        (lambda: Radio(snr_db=math.inf), "Radio.snr_db"),
        (lambda: Chain(channels=()), "Chain.channels is empty"),
        (lambda: Chain(channels=(Quantise(), Radio())), "Radio cannot come behind Quantise: it sends codes"),
        (lambda: Chain(channels=(TopK(), RandomK())), "RandomK cannot come behind TopK: .* sparse only once"),
        (
            lambda: Chain(channels=(TopK(), OverTheAir())),
            "OverTheAir cannot come behind TopK: clients send different places",
        ),
        (lambda: Chain(channels=(OverTheAir(), Clip())), "Clip cannot come behind OverTheAir"),
        (lambda: simprox(channel=OverTheAir()), "only the sum of the replies, but SimProxWeights.* reads each"),
        (lambda: simprox(channel=Chain(channels=(Clip(), OverTheAir()))), "only the sum of the replies"),
    ],
)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build()


def test_replies_without_a_model_are_refused() -> None:
    with pytest.raises(Invalid, match=r"channel Clip acts on the model that a client sends, but .* send loss"):
        Clip().encode({"loss": torch.tensor(1.0)}, {"model": model(0)}, {}, torch.tensor(0))
