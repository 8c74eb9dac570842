"""Nothing is lost in wrappers: every optional capability through every part that holds another of its kind.

Wrappers and capabilities are found, not listed: a new one of either is tested by being there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch

from consilience import channel, client, privacy, selection, server
from consilience.channel import Chain, Clip, OverTheAir, Quantise, TopK
from consilience.client.local_training import LocalTraining
from consilience.client.reporting import LossAtStart, ScoreAtEnd
from consilience.client.solvers import SGD
from consilience.client.wrapped import Wrapped
from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import (
    ChannelCapability,
    ChoosesCount,
    ClientCapability,
    PersonalRule,
    PostTrainingPass,
    PreTrainingPass,
    Reasons,
    SelectionCapability,
    ServerCapability,
    Wraps,
    capability,
)
from consilience.core.evaluate import Evaluate
from consilience.core.plans import Work
from consilience.core.protocols import Channel, ClientRule, Selection, ServerRule
from consilience.core.settings import Invalid, hints_of
from consilience.core.tree import Tree
from consilience.options.parts import parts_of
from consilience.selection import Uniform
from consilience.selection.fixed_for_rounds import FixedForRounds
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.combining.krum import Krum
from consilience.server.averaging.weighting.capped import CappedWeights
from consilience.server.protocols import Combine as CombineProtocol
from consilience.server.protocols import CombineCapability, Weighting, WeightingCapability, read_by
from consilience.server.rules.buffered import Buffered
from consilience.server.rules.paced_averaging import PacedAveraging
from consilience.task.task import Task

assert client and channel and selection and server and privacy  # every package with parts is loaded

MARK = "kept by the part inside"


class ClientStub:
    """A client rule without optional behaviour."""

    work, solver = Work(), SGD()

    def init(self, start: Tree) -> Tree:
        return {MARK: torch.zeros(())}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        return {}

    def step(self, task: Task, carry: Tree, batch: Any, message: Tree, memory: Tree) -> Tree:
        return carry

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {}, memory


class ServerStub:
    """A server rule without optional behaviour."""

    needs_each_reply = False

    def init(self, start: Tree, clients: int) -> Tree:
        return {MARK: torch.zeros(())}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Any: ...

    def update(self, state: Tree, cohort: Any) -> Any: ...

    def model(self, state: Tree) -> Any: ...


class SelectionStub:
    """A selection without optional behaviour."""

    def choose(self, round: int, pool: Any, seed: int) -> np.ndarray:
        return np.arange(1)


class ChannelStub:
    """A channel without optional behaviour."""

    def init(self, start: Tree) -> Tree:
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Any) -> Any: ...

    def decode(self, cohort: Any, received: Any, key: int) -> Any: ...


class WeightingStub:
    """A weighting without optional behaviour."""

    needs_each_reply = False

    def init(self, start: Tree, clients: int) -> Tree:
        return {}

    def weigh(self, cohort: Any, model: Tree, state: Tree) -> Any: ...


class CombineStub:
    """A combining rule without optional behaviour."""

    needs_each_reply = False

    def merge(self, models: Tree, weights: Any) -> Any: ...


class Kind(NamedTuple):
    """A kind of part: its protocol, what its optional protocols share, and the least part of that kind."""

    protocol: type
    optional: type
    stub: type


KINDS = (
    Kind(Selection, SelectionCapability, SelectionStub),
    Kind(ClientRule, ClientCapability, ClientStub),
    Kind(Channel, ChannelCapability, ChannelStub),
    Kind(ServerRule, ServerCapability, ServerStub),
    Kind(Weighting, WeightingCapability, WeightingStub),
    Kind(CombineProtocol, CombineCapability, CombineStub),
)
NEEDED: dict[type, dict[str, Any]] = {
    CappedWeights: {"max_client": 0.5}
}  # options without which a wrapper cannot be made


# --- what there is ---------------------------------------------------------------------------------------------------


def rule_fields(part: type, kind: Kind) -> list[str]:
    """The fields of a part that hold others of its kind."""
    same = {kind.protocol, *parts_of(kind.protocol).values()}
    hints = hints_of(part)
    return [each.name for each in dataclasses.fields(part) if same & set(_members(hints[each.name]))]


def _members(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _members(inner)


@functools.cache
def wrappers() -> tuple[tuple[type, Kind], ...]:
    """Every part with a field of its own kind."""
    found = ((part, kind) for kind in KINDS for part in parts_of(kind.protocol).values())
    return tuple((part, kind) for part, kind in found if rule_fields(part, kind))


def capabilities(kind: Kind) -> list[type]:
    """Every optional protocol of a kind."""
    return sorted(kind.optional.__subclasses__(), key=lambda protocol: protocol.__name__)


PAIRS = [(part, kind, protocol) for part, kind in wrappers() for protocol in capabilities(kind)]


def test_the_wrappers_and_capabilities_that_we_know_of_are_among_those_found() -> None:
    found = {part.__name__ for part, _ in wrappers()}
    clients = {"LossAtStart", "ScoreAtEnd", "ReportsGamma", "WithGradientSum", "LabelCounting", "PacedTraining"}
    assert clients | {"ChoosingTraining", "LocalOnly", "PersonalTraining"} <= found
    assert {"EdgeCloud", "ChosenClusters", "Bipartition", "Buffered"} <= found
    assert {"CappedWeights", "NearestNeighbourMixing", "Chain", "FixedForRounds"} <= found
    assert [len(capabilities(kind)) for kind in KINDS] >= [3, 5, 3, 8, 1, 3]


@pytest.mark.parametrize(("part", "kind"), wrappers(), ids=lambda value: getattr(value, "__name__", ""))
def test_every_wrapper_says_what_it_wraps(part: type, kind: Kind) -> None:
    assert issubclass(part, Wraps), f"{part.__name__} holds {rule_fields(part, kind)}: it must be a `Wraps`"
    assert part.holds in rule_fields(part, kind)
    for protocol, reason in {**part.replaces, **part.refuses}.items():
        assert protocol in capabilities(kind) and len(reason.split()) > 4, (part, protocol, reason)
    assert not set(part.replaces) & set(part.refuses)


# --- every capability through every wrapper --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _any_part_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in is accepted where a wrapper wants a part of one class, such as `LocalTraining`."""
    for part, kind in wrappers():
        if dataclasses.is_dataclass(hints_of(part)[part.holds]):  # type: ignore[attr-defined]
            monkeypatch.setitem(hints_of(part), part.holds, kind.protocol)  # type: ignore[attr-defined]


class Use(NamedTuple):
    """That a member of the part inside was reached."""

    member: str
    arguments: dict[str, Any]


def offering(kind: Kind, protocol: type) -> tuple[Any, list[Use]]:
    """A part that offers one capability and nothing else, and the list of its uses."""
    uses: list[Use] = []

    def recording(name: str, member: Any) -> Any:
        if isinstance(member, property):
            value = sample(typing.get_type_hints(member.fget)["return"])
            return property(lambda self: uses.append(Use(name, {})) or value)
        signature = inspect.signature(member)

        def method(self: Any, *args: Any, **kwargs: Any) -> None:
            uses.append(Use(name, dict(signature.bind(self, *args, **kwargs).arguments)))

        return method

    members = {name: recording(name, member) for name, member in vars(protocol).items() if is_member(name)}
    return type("Offering", (kind.stub,), members)(), uses


def is_member(name: str) -> bool:
    return not name.startswith("_")


def sample(annotation: Any) -> Any:
    """Some value of a property's type."""
    values = {bool: True, int: 3, str: "dense", ClientRule: Evaluate(), object: "layers", float: 1.0}
    values |= {CombineProtocol: Krum(), privacy.Spending: privacy.Spending(noise=1.0)}
    for member in _members(annotation):
        if member in values:
            return values[member]
        if typing.get_origin(member) is tuple:
            return ("something",)
        if typing.get_origin(member) is frozenset:
            return frozenset()
    raise AssertionError(f"no sample of {annotation}: add one")


def made(part: type, inner: Any) -> Any:
    """The wrapper around an inner part."""
    held: Any = hints_of(part)[part.holds]  # type: ignore[attr-defined]
    value = (inner,) if typing.get_origin(held) is tuple else inner
    return part(**{part.holds: value}, **NEEDED.get(part, {}))  # type: ignore[attr-defined]


def use(found: Any, protocol: type, wrapper: Any) -> None:
    """Call every method of a capability, or read its properties if it has no method."""
    task = Task(tiny.mlp().double())
    start = task.start()
    stacked = tree.stack([start] * 7)
    message = {"model": start, "models": stacked, "round": torch.tensor(0)}
    memory = wrapper.init(start) if isinstance(wrapper, ClientRule) else {}
    shared = {"task": task, "message": message, "memory": memory, "model": start, "models": stacked, "centre": start}
    known = {**shared, "weights": torch.full((7,), 1 / 7, dtype=torch.float64), "replies": 7}
    methods = [name for name, member in vars(protocol).items() if is_member(name) and not isinstance(member, property)]
    for name in methods:
        asked = [key for key in inspect.signature(vars(protocol)[name]).parameters if key != "self"]
        getattr(found, name)(**{key: known[key] for key in asked})
    for name in () if methods else filter(is_member, vars(protocol)):
        getattr(found, name)


def reads_what_is_kept(protocol: type) -> bool:
    """Whether a capability is used with a client's memory or the server's state."""
    members = [member for name, member in vars(protocol).items() if is_member(name)]
    rules = [m for m in members if isinstance(m, property) and typing.get_type_hints(m.fget)["return"] is ClientRule]
    methods = [inspect.signature(m).parameters for m in members if not isinstance(m, property)]
    return bool(rules) or any({"memory", "state"} & set(parameters) for parameters in methods)


def kept_by(wrapper: Any) -> Tree:
    """The memory of a client before its first round, or the server's state before round 0."""
    start = Task(tiny.mlp()).start()
    return wrapper.init(start) if isinstance(wrapper, ClientRule) else wrapper.init(start, 5)


def problem(part: Any, kind: Kind, protocol: type) -> str:
    """How a wrapper loses a capability of the part inside; "" if it passes it on or declares why not."""
    inner, uses = offering(kind, protocol)
    assert capability(inner, protocol) is inner, "the part inside must offer it"
    if protocol in part.refuses:
        try:
            made(part, inner)
        except Invalid as refusal:
            told = part.refuses[protocol] in str(refusal) and f"{part.__name__}.{part.holds} = Offering" in str(refusal)
            return "" if told else f"its refusal is another: {refusal}"
        return "it says that it refuses, and does not"
    wrapper = made(part, inner)
    found = capability(wrapper, protocol)
    if protocol in part.replaces:
        return "" if found is not inner else "it says that it replaces it, and does not"
    if found is inner:
        elsewhere = reads_what_is_kept(protocol) and MARK not in kept_by(wrapper)
        return "the part inside would be given what the wrapper keeps, not what it keeps itself" if elsewhere else ""
    if found is None:
        return "lost"
    uses.clear()  # looking for a capability reads properties, too
    use(found, protocol, wrapper)
    wanted = {name for name, member in vars(protocol).items() if is_member(name) and not isinstance(member, property)}
    missed = (wanted or set(filter(is_member, vars(protocol)))) - {one.member for one in uses}
    if missed:
        return f"its own {', '.join(sorted(missed))} stands before the inner one, undeclared"
    strange = [one.member for one in uses if MARK not in one.arguments.get("memory", {MARK: ()})]
    return f"{strange[0]} is given another memory than the inner part's" if strange else ""


@pytest.mark.parametrize(
    ("part", "kind", "protocol"), PAIRS, ids=[f"{protocol.__name__}-in-{part.__name__}" for part, _, protocol in PAIRS]
)
def test_a_capability_is_found_through_the_wrapper_or_declared(part: type, kind: Kind, protocol: type) -> None:
    assert not problem(part, kind, protocol)


@pytest.mark.parametrize(("part", "kind"), wrappers(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrapper_invents_nothing(part: type, kind: Kind) -> None:
    """Around a part without options it offers what it has itself; and equal wrappers are equal, as keys too."""
    wrapper = made(part, inner := kind.stub())
    for protocol in capabilities(kind):
        assert capability(wrapper, protocol) in (None, wrapper)
    assert wrapper == made(part, inner) and hash(wrapper) == hash(made(part, inner))
    assert {each.name for each in dataclasses.fields(part)} & {"holds", "refuses", "replaces"} == set()


# --- the test notices ------------------------------------------------------------------------------------------------


CLIENTS = next(kind for kind in KINDS if kind.protocol is ClientRule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Displacing(Wrapped):
    """Its pass takes the place of the inner one's, and nobody is told."""

    training: ClientRule = dataclasses.field(default_factory=LocalTraining)

    @property
    def pre_training(self) -> ClientRule:
        return Evaluate()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Misleading(Wrapped):
    """It puts the inner memory elsewhere and lets the inner rule look for it in vain."""

    training: ClientRule = dataclasses.field(default_factory=LocalTraining)

    def init(self, start: Tree) -> Tree:
        return {"inner": self.training.init(start)}

    @property
    def is_personal(self) -> bool:
        return True

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        own = capability(self.training, PersonalRule)
        assert own is not None
        return own.personal(task, message, memory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hiding(Wrapped):
    """As `Misleading`, by leaving everything to the rule inside."""

    training: ClientRule = dataclasses.field(default_factory=LocalTraining)

    def init(self, start: Tree) -> Tree:
        return {"inner": self.training.init(start)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boasting(Wrapped):
    """It declares a refusal and never checks."""

    training: ClientRule = dataclasses.field(default_factory=LocalTraining)
    refuses: typing.ClassVar[Reasons] = {PostTrainingPass: "has a pass after training, which I refuse"}

    def __post_init__(self) -> None:
        pass


def test_faulty_wrappers_are_noticed() -> None:
    assert "undeclared" in problem(Displacing, CLIENTS, PreTrainingPass)
    assert "another memory" in problem(Misleading, CLIENTS, PersonalRule)
    assert "not what it keeps itself" in problem(Hiding, CLIENTS, PersonalRule)
    assert "not what it keeps itself" in problem(Hiding, CLIENTS, PreTrainingPass)
    assert "does not" in problem(Boasting, CLIENTS, PostTrainingPass)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_the_nearest_part_that_offers_it_answers() -> None:
    inner = LocalTraining()
    twice = ScoreAtEnd(training=LossAtStart(training=inner))
    assert capability(twice, PersonalRule) is inner
    assert capability(twice, PreTrainingPass) is twice.training
    assert capability(twice, PostTrainingPass) is twice
    assert capability(inner, PreTrainingPass) is None and capability(object(), PersonalRule) is None


def test_two_passes_before_training_are_refused_with_the_reason() -> None:
    with pytest.raises(Invalid, match=r"LossAtStart\.training = LossAtStart has a pass before training, and so has"):
        LossAtStart(training=LossAtStart())


def test_what_a_weighting_reads_is_known_through_servers_and_caps() -> None:
    reading = CappedWeights(inner=WeightingReading(), max_client=0.5)
    for rule in (Averaging(weighting=reading), PacedAveraging(weighting=reading)):
        assert read_by(rule) == ("moved",)


def test_a_chain_inside_a_chain_is_what_its_channels_are() -> None:
    inner = Chain(channels=(Clip(bound=1.0), TopK(fraction=0.5, feedback=True)))
    outer = Chain(channels=(inner, Quantise(bits=8)))
    assert (inner.form, outer.form) == ("sparse", "codes")
    assert outer.feedback and not Chain(channels=(TopK(fraction=0.5, feedback=False),)).feedback
    with pytest.raises(Invalid, match="TopK cannot come behind TopK"):
        Chain(channels=(inner, TopK(fraction=0.1)))
    with pytest.raises(Invalid, match="Clip cannot come behind Quantise"):
        Chain(channels=(outer, Clip(bound=1.0)))


def test_a_count_of_clients_is_known_inside_a_fixed_selection() -> None:
    found = capability(FixedForRounds(inner=Uniform(count=7)), ChoosesCount)
    assert found is not None and found.count == 7


def test_who_looks_at_each_reply_is_named_through_wrappers() -> None:
    server = Buffered(averaging=Averaging(combine=Krum()))
    with pytest.raises(Invalid, match=r"only the sum of the replies, but Krum reads each reply"):
        Algorithm(selection=Uniform(count=2), client=LocalTraining(), server=server, channel=OverTheAir())


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightingReading(WeightingStub):  # type: ignore[misc]
    """It reads one more number."""

    reads: tuple[str, ...] = ("moved",)
