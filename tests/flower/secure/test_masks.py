"""The masks of secure sums and the protocol around them: nodes that leave at any stage, neighbours, a false server."""

from __future__ import annotations

import copy
import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from consilience.core.settings import Invalid

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from consilience.flower.messages import wire
from consilience.flower.messages.mail import NodeReplies
from consilience.flower.secure import masks
from consilience.flower.secure.checked_grid import SumRequest, SumResult
from consilience.flower.secure.client import contribution, masked
from consilience.flower.secure.sum import secure_sum
from consilience.flower.secure.terms import MODULUS, SecureTerms
from consilience.wire import arrays

STAGES = ("setup", "share_keys", "collect_masked_vectors", "unmask")
G18 = 3.6e-6  # of each contribution, with a clip of 8 and 2^22 levels
CONFIGS = "secaggplus_configs"


# --- the generator ---------------------------------------------------------------------------------------------------


def test_masks_are_chacha20_under_hkdf_as_another_library_computes_them() -> None:
    from Crypto.Cipher import ChaCha20
    from Crypto.Hash import SHA256
    from Crypto.Protocol.KDF import HKDF

    secret, info = bytes(range(44)), masks.binding(run="a", case="", round=3, turn=4)
    derived = HKDF(secret, 48, b"", SHA256, context=info)
    stream = ChaCha20.new(key=derived[:32], nonce=derived[36:]).encrypt(bytes(4 * 1000))
    assert np.array_equal(masks.mask(secret, info, 1000), np.frombuffer(stream, "<u4"))


def test_masks_are_uniform() -> None:
    """Chi-squared of every byte of the words (255 degrees of freedom: 6 deviations), bits, and neighbouring words."""
    count = 1 << 20
    values = masks.mask(b"s" * 44, b"info", count)
    assert values.dtype == np.int64 and 0 <= values.min() < 1 << 13 and MODULUS - (1 << 13) <= values.max() < MODULUS
    for byte in range(4):
        seen = np.bincount((values >> 8 * byte) & 255, minlength=256)
        assert abs(((seen - count / 256) ** 2 / (count / 256)).sum() - 255) < 6 * np.sqrt(2 * 255)
    bits = (values[:, None] >> np.arange(32)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 6 * 0.5 / np.sqrt(count)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 6 / np.sqrt(count)


def test_every_bit_of_the_secret_counts_and_no_two_sums_share_a_mask() -> None:
    """Flower's generator knows 2^32 seeds: secrets whose words have one XOR give one mask."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    one, other = bytes(44), b"\x07\0\0\0" * 2 + bytes(36)
    assert np.array_equal(pseudo_rand_gen(one, MODULUS, [(9,)])[0], pseudo_rand_gen(other, MODULUS, [(9,)])[0])
    about = [
        {"run": run, "case": case, "round": r, "turn": t} for run in "ab" for case in "ab" for r, t in ((1, 2), (2, 1))
    ]
    drawn = [masks.mask(secret, masks.binding(**one), 9) for secret in (one, other) for one in about]
    assert len({values.tobytes() for values in drawn}) == len(drawn) == 16
    flipped = {masks.mask(bytes([1 << bit]) + bytes(31), b"", 2).tobytes() for bit in range(8)}
    assert len(flipped) == 8


def test_sums_of_others_in_the_process_keep_flowers_generator() -> None:
    import importlib

    masks.install(masks.CLIENT)
    theirs = getattr(importlib.import_module(masks.CLIENT), masks.NAME)
    before = theirs(bytes(32), MODULUS, [(5,), ()])
    with masks.bound(b"here", masks.CLIENT) as mine:
        here = theirs(bytes(32), MODULUS, [(5,), ()])
    again = theirs(bytes(32), MODULUS, [(5,), ()])
    assert mine.drawn == 1 and all(map(np.array_equal, before, again)) and not np.array_equal(before[0], here[0])


def test_a_flower_that_draws_its_masks_elsewhere_is_noticed_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib

    stage = Stage(3, SecureTerms(weights="uniform"))
    masks.install(masks.CLIENT)
    module = importlib.import_module(masks.CLIENT)
    elsewhere = lambda seed, most, shapes: [np.zeros(shape, np.int64) for shape in shapes]  # noqa: E731
    monkeypatch.setattr(masks, "install", lambda name: None)
    monkeypatch.setattr(module, masks.NAME, elsewhere)
    found = stage.sum()
    assert found.mean is None and all("0 masks were drawn" in why for why in found.failures.values())


# --- the protocol, without a network and without training -------------------------------------------------------------


class Stage:
    """n nodes with a vector each; `drop` says who does not answer which stage, `cheat` what a server changes."""

    def __init__(self, nodes: int, terms: SecureTerms, length: int = 6) -> None:
        from flwr.app import RecordDict

        self.terms, self.nodes = terms, [1000 + 7 * k for k in range(nodes)]
        draw = np.random.default_rng(nodes)
        self.vectors = {node: draw.uniform(-7, 7, length) for node in self.nodes}
        self.contexts = {node: SimpleNamespace(state=RecordDict()) for node in self.nodes}
        self.drop: dict[str, set[int]] = {}
        self.cheat: Any = lambda node, stage, configs: None
        self.sent: dict[str, dict[int, Any]] = {stage: {} for stage in STAGES}
        self.asked: dict[str, dict[int, Any]] = {stage: {} for stage in STAGES}
        self.length, self.turn = length, 0

    def ask(self, contents: Any, kind: str, group: str, deadline: float, bounds: Any) -> NodeReplies:
        answers = NodeReplies()
        for node, given in contents.items():
            content = copy.deepcopy(given)  # in the first stage, one for all
            stage = str(content.config_records[CONFIGS]["stage"])
            if node not in self.drop.get(stage, ()):
                self.cheat(node, stage, content.config_records[CONFIGS])
                try:
                    answers.replies[node] = self.answer(node, content)
                    self.sent[stage][node] = answers.replies[node].config_records[CONFIGS]
                except Exception as problem:
                    answers.failures[node] = f"{type(problem).__name__}: {problem}"
        return answers

    def answer(self, node: int, content: Any) -> Any:
        from flwr.app import Message

        stage = str(content.config_records[CONFIGS]["stage"])
        self.asked[stage][node] = dict(content.config_records[CONFIGS])
        vector = {"x": torch.from_numpy(self.vectors[node])}
        said = wire.ReplyReport(
            client=0, run="run", round=self.turn, examples=1, steps=1, digest="", memory="", lost=False
        )
        reply = lambda content, context: contribution(context, 1, said, vector, {}, self.terms)  # noqa: E731
        message = Message(content, node, "train")
        return masked(message, self.contexts[node], self.terms, reply).content

    def sum(self) -> SumResult:
        self.turn += 1
        asked = SumRequest(
            contents={node: self._order() for node in self.nodes},
            case="",
            turn=self.turn,
            group="round",
            binding=masks.binding(run="run", case="", round=self.turn, turn=self.turn),
            heaviest=1.0,
            length=self.length,
            look=lambda node, content: (wire.get_answer(content)[0], wire.get_aside(content)),
        )
        return secure_sum(self, self.terms, asked, 1.0)  # type: ignore[arg-type]

    def _order(self) -> Any:
        content = wire.records().RecordDict()
        order = {"run": "run", "case": "", "rule": "train", "round": self.turn, "seed": 1, "agreement": {}}
        wire.put_json(content, "order", {**order, "clients": [0], "steps": [1], "heard": [True], "memory": [""]})
        return content

    def refuse_wrong(self, found: SumResult, summed: list[int]) -> None:
        """The mean of exactly these nodes, within the bound of quantisation."""
        assert found.mean is not None, found.why
        assert sorted(found.in_clear) == sorted(summed)
        total = np.sum([self.vectors[node] for node in summed], axis=0)
        assert np.abs(found.mean * len(summed) - total).max() <= len(summed) * G18


UNIFORM = SecureTerms(weights="uniform")


@pytest.fixture
def on_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower shuffles nodes before it puts them on the ring; here they stay in order."""
    monkeypatch.setattr(random, "shuffle", lambda nodes: nodes.sort())


@pytest.mark.parametrize("stage", STAGES)
def test_exactly_at_the_threshold_there_is_a_sum_and_one_below_there_is_none(stage: str) -> None:
    nodes = 7
    needed = UNIFORM.needed(nodes)
    assert needed == 4
    here = Stage(nodes, UNIFORM)
    here.drop[stage] = set(here.nodes[: nodes - needed])
    here.refuse_wrong(here.sum(), here.nodes if stage == "unmask" else here.nodes[nodes - needed :])
    here.drop[stage] = set(here.nodes[: nodes - needed + 1])
    found = here.sum()
    assert found.mean is None
    assert found.why == f"3 of 7 nodes answered stage {STAGES.index(stage) + 1} of 4, and 4 are needed"
    here.drop = {}
    here.refuse_wrong(here.sum(), here.nodes)  # and the next sum has all of them


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("on_a_ring")
def test_with_neighbours_the_threshold_holds_for_every_nodes_own(stage: str) -> None:
    """16 nodes, 6 neighbours each: 5 of 7 must stay, so two side by side may leave, and two far away; three may not."""
    terms = SecureTerms(weights="uniform", neighbours=6)
    assert (terms.shares(16), terms.needed(16)) == (7, 5)
    here = Stage(16, terms)
    gone = [here.nodes[k] for k in (0, 1, 8, 9)]
    here.drop[stage] = set(gone)
    here.refuse_wrong(here.sum(), [node for node in here.nodes if stage == "unmask" or node not in gone])
    here.drop[stage] = {here.nodes[k] for k in (0, 1, 3)}
    found = here.sum()
    assert found.mean is None and f"stage {STAGES.index(stage) + 1} of 4, and 5 of every node's 7" in found.why


def test_nodes_leave_at_all_stages_of_one_sum() -> None:
    here = Stage(9, UNIFORM)
    here.drop = dict(zip(STAGES, ({node} for node in here.nodes)))
    here.refuse_wrong(here.sum(), here.nodes[3:])


@pytest.mark.parametrize(("nodes", "neighbours"), [(3, None), (10, None), (20, 8), (50, 10)])
def test_sums_of_up_to_fifty_nodes_are_within_the_bound(nodes: int, neighbours: int | None) -> None:
    here = Stage(nodes, SecureTerms(weights="uniform", neighbours=neighbours))
    for stage in STAGES if nodes < 20 else STAGES[2:3]:
        gone = {} if nodes == 3 else {stage: {here.nodes[0]}}
        here.drop = gone
        here.refuse_wrong(here.sum(), here.nodes if stage == "unmask" or not gone else here.nodes[1:])
    keys = [len(asked) - 1 for asked in here.asked["share_keys"].values()]  # beside the name of the stage
    assert max(keys) == (nodes if neighbours is None else neighbours + 1)


def test_what_a_node_sends_is_uniform_whatever_its_vector_is() -> None:
    """All vectors are zero: every word that is sent is its masks."""
    here = Stage(5, UNIFORM, length=20_000)
    here.vectors = dict.fromkeys(here.nodes, np.zeros(20_000))
    found = here.sum()
    assert found.mean is not None and np.abs(found.mean).max() <= G18
    for node in here.nodes:
        data = here.sent["collect_masked_vectors"][node]["masked_params"][1]
        seen = np.bincount(arrays.from_bytes(data, (20_000,), torch.int64).numpy() >> 24, minlength=256)
        assert abs(((seen - 20_000 / 256) ** 2 / (20_000 / 256)).sum() - 255) < 6 * np.sqrt(2 * 255)


def test_nodes_that_stay_are_always_one_ring() -> None:
    """Every set of leaving nodes that passes the threshold, of 11 on a ring: no part of them is cut off."""
    nodes, passed = 11, 0
    for neighbours in (4, 6, 8):
        terms, half = SecureTerms(neighbours=neighbours), neighbours // 2
        near = [{(k + step) % nodes for step in range(-half, half + 1)} for k in range(nodes)]
        for bits in itertools.product((True, False), repeat=nodes):
            here = {k for k in range(nodes) if bits[k]}
            if any(len(near[k] & here) < terms.needed(nodes) for k in range(nodes)):
                continue
            passed += 1
            reached, rim = {min(here)}, {min(here)}
            while rim:
                rim = {other for k in rim for other in near[k] & here} - reached
                reached |= rim
            assert reached == here
    assert passed > 100


def test_exposure_is_that_of_counting_all_cases() -> None:
    terms = SecureTerms(neighbours=4)
    shares, needed = terms.shares(9), terms.needed(9)
    cases = [sum(k < 5 for k in around) >= needed for around in itertools.combinations(range(8), shares - 1)]
    assert terms.exposure(9, 5) == pytest.approx(min(1.0, 4 * np.mean(cases)))
    assert SecureTerms().exposure(50, 25) == 0.0 < SecureTerms(neighbours=10).exposure(50, 25)


# --- servers that want more than the sum ------------------------------------------------------------------------------


def test_both_masks_of_one_client_are_refused_in_one_question_and_in_two() -> None:
    here = Stage(5, UNIFORM)
    victim = here.nodes[0]

    def both(node: int, stage: str, configs: Any) -> None:
        if stage == "unmask":
            configs["dead_nids"] = [victim]

    here.cheat = both
    found = here.sum()
    assert found.mean is None and len(found.failures) == 5
    assert all("asks for both masks of one client" in why for why in found.failures.values())
    here = Stage(5, UNIFORM)
    here.refuse_wrong(here.sum(), here.nodes)
    for node in here.nodes[1:]:  # each has given the share of the victim's seed
        content = wire.records().RecordDict()
        others = [other for other in here.nodes if other != victim]
        asked = {"stage": "unmask", "active_nids": others, "dead_nids": [victim]}
        content[CONFIGS] = wire.records().ConfigRecord(asked)
        wire.put_json(content, wire.ABOUT, {"case": "", "turn": here.turn})
        with pytest.raises(ValueError, match=r"expect setup stage, but receive unmask"):
            here.answer(node, content)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("share_num", 5, "share_num = 5: 7 was agreed on"), ("threshold", 4, "threshold = 4: 5 was agreed on")],
)
def test_fewer_neighbours_than_agreed_are_refused(key: str, value: int, why: str) -> None:
    here = Stage(12, SecureTerms(weights="uniform", neighbours=6))
    here.cheat = lambda node, stage, configs: configs.__setitem__(key, value) if stage == "setup" else None
    found = here.sum()
    assert found.mean is None and len(found.failures) == 12 and all(why in reason for reason in found.failures.values())


def test_an_odd_number_of_neighbours_is_refused() -> None:
    with pytest.raises(Invalid, match=r"neighbours = 5 is odd"):
        SecureTerms(neighbours=5)
    with pytest.raises(Invalid, match=r"neighbours = 2 is out of range"):
        SecureTerms(neighbours=2)
