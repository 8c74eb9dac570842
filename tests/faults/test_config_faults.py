"""Bad settings are refused before anything starts: key, value, what is allowed, and the nearest valid key (G9)."""

from __future__ import annotations

import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consilience.core.settings import Invalid, Option, Range
from consilience.experiments.config import config
from consilience.experiments.config.catalogue import KINDS, engine_options, section_options
from consilience.options import parts
from consilience.runs import toml_text
from consilience.server.rules.public_rows import PublicRows

Case = tuple[dict[str, Any], str, str]
"""(config, the key that the refusal must name, what is wrong)"""


def sections() -> Iterator[tuple[str, dict[str, Any], dict[str, Option]]]:
    """Every section a config can have: its name, a valid table of it, and its options."""
    for section, kind in KINDS.items():
        for name in kind.factories():
            known = section_options(section, name)
            needed = {key: sample(option.annotation) for key, option in known.items() if option.required}
            yield section, {"name": name, **needed}, known
    yield "engine", {}, engine_options()
    hints = {"every": Option(config.Count), "keep": Option(config.Count)}
    yield "checkpoint", {}, hints


def sample(annotation: Any) -> Any:
    """A value that fits an annotation."""
    for member in parts._members(annotation):
        origin, inner = typing.get_origin(member), typing.get_args(member)
        if getattr(member, "_is_protocol", False):
            return {"name": "noise_rows"} if member is PublicRows else {"name": "iid", "clients": 2}
        if origin is typing.Literal:
            return inner[0]
        if origin is tuple:
            return [] if inner[-1] is Ellipsis and inner[0] is str else [sample(m) for m in inner if m is not Ellipsis]
        if member in (int, float):
            return 1
        if member is str:
            return "text"
    return None


def mutations() -> Iterator[Case]:
    for section, table, known in sections():
        for key, option in known.items():
            yield {section: {**table, f"{key}q": 1}}, f"{section}.{key}q", "unknown key"
            if table.get("name") == "mixture" or parts.protocol_in(option.annotation):
                yield {section: {**table, key: {"name": "nosuch"}}}, f"{section}.{key}", "unknown part"
                yield {section: {**table, key: 3}}, f"{section}.{key}", "wrong type"
                continue
            for value in wrong(option.annotation):
                yield {section: {**table, key: value}}, f"{section}.{key}", f"{value!r}"
        for key, option in known.items():
            if option.required:
                left = {k: v for k, v in table.items() if k != key}
                if not (section == "partition" and key in ("clients", "alpha")):  # those have default values
                    yield {section: left}, f"{section}.{key}", "missing"
        if table.get("name"):
            yield {section: {**table, "name": table["name"] + "x"}}, f"{section}.name", "unknown name"
            yield {section: {**table, "name": 7}}, f"{section}.name", "a name that is no text"
    for key in ("name", "seed", "rounds", "loss", "threads", "data_dir", "runs"):
        yield {f"{key}s2": 1}, f"{key}s2", "unknown key"
        yield {key: {"a": 1}}, key, "wrong type"
        yield {key: [1]}, key, "wrong type"
    for key, values in {"seed": (-1, 1.5, "1", True, 2**63), "rounds": (0, -3, 2.0, "many"), "threads": (0,)}.items():
        yield from (({key: value}, key, repr(value)) for value in values)
    for section in (*KINDS, "engine", "evaluation", "checkpoint"):
        yield {section: 3}, section, "a section that is no table"
        yield {f"{section}z": {}}, f"{section}z", "unknown section"


def wrong(annotation: Any) -> Iterator[Any]:
    """Values that break an annotation: another type, out of range, not finite."""
    members = list(parts._members(annotation))
    plain = [m for m in members if m in (int, float, bool, str)]
    lists = any(typing.get_origin(m) is tuple for m in members)
    if str not in plain and not any(typing.get_origin(m) is typing.Literal for m in members):
        yield "no such thing"
    if any(typing.get_origin(m) is typing.Literal for m in members):
        yield "nosuchchoice"
        yield 17
    if plain and bool not in plain and plain != [str]:
        yield True
    if int in plain and float not in plain:
        yield 1.5
    if plain == [str]:
        yield 12
    if not any(parts._is_mapping(m) for m in members):
        yield {"a": 1}
    if not lists:
        yield [1, 2]
    if float in plain:
        yield from (float("nan"), float("inf"), -float("inf"))
    for bounds in ranges(annotation):
        yield from outside(bounds)


def ranges(annotation: Any) -> list[Range]:
    """The ranges at the top of an annotation (unions included, unless they also allow a list)."""
    if typing.get_origin(annotation) is typing.Annotated:
        return [note for note in typing.get_args(annotation)[1:] if isinstance(note, Range)]
    inner = [ranges(member) for member in typing.get_args(annotation)] if parts._members(annotation) else []
    return inner[0] if inner and typing.get_origin(annotation) is not tuple else []


def outside(bounds: Range) -> Iterator[int]:
    if bounds.least is not None:
        yield int(bounds.least) - 1
    if bounds.above is not None:
        yield from (int(bounds.above), int(bounds.above) - 1)
    if bounds.most is not None:
        yield int(bounds.most) + 1
    if bounds.below is not None:
        yield int(bounds.below)


def test_every_mutated_config_is_refused_by_key_and_fast() -> None:
    cases = list(mutations())
    assert len(cases) >= 1000, len(cases)
    slowest, accepted, unnamed = 0.0, [], []
    for table, key, what in cases:
        began = time.process_time()  # whatever else the machine does
        try:
            config.from_table(table)
            accepted.append((key, what))
        except Invalid as problem:
            if key not in str(problem):
                unnamed.append((key, what, str(problem)))
        slowest = max(slowest, time.process_time() - began)
    assert not accepted, accepted[:10]
    assert not unnamed, unnamed[:10]
    assert slowest < 2


def test_the_unmutated_tables_are_accepted() -> None:
    refused = []
    for section, table, _ in sections():
        try:
            config.from_table({section: table})
        except Invalid as problem:
            refused.append(f"{section} {table}: {problem}")
    assert not refused, refused


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("algorithm.lerning_rate=0.1", "algorithm.lerning_rate", "known here"),
        ("algorithm.epoch=2", "algorithm.epoch", "did you mean 'epochs'"),
        ("partition.alfa=0.1", "partition.alfa", "did you mean 'alpha'"),
        ("algorithm=simprx", "algorithm.name", "did you mean 'simprox'"),
        ("data=minst", "data.name", "did you mean 'mnist'"),
        ("ruonds=3", "ruonds", "did you mean 'rounds'"),
        ("algorithm.lr=-0.1", "algorithm.lr = -0.1", "must be > 0"),
        ("algorithm.lr=0", "algorithm.lr = 0", "must be > 0"),
        ("algorithm.lr=nan", "algorithm.lr = nan", "must be > 0"),
        ("algorithm.lr=fast", "algorithm.lr = 'fast'", "must be a number"),
        ("rounds=0", "rounds = 0", "must be >= 1"),
        ("algorithm.selection.fraction=1.5", "algorithm.selection.fraction = 1.5", "> 0 and <= 1"),
        ("engine.clients_at_once=0", "engine.clients_at_once = 0", "must be >= 1"),
        ("environment.silent=ignore", "environment.silent = 'ignore'", "broadcast_model, renormalise"),
        ("model.inputs=[3]", "model.inputs", "comes from the data"),
        ("data.data_dir=/x", "data.data_dir", "data_dir at the top"),
    ],
)
def test_the_message_names_key_value_range_and_nearest(override: str, key: str, hint: str) -> None:
    with pytest.raises(Invalid) as caught:
        config.load(None, [override])
    assert key in str(caught.value) and hint in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        *(
            "nothing",
            "=3",
            "a..b=3",
            "a b=3",
            "../x=1",
            "seed=1\nrounds=2",
            "x" * 100 + "=1",
            ".".join("a" * 40) + "=1",
        ),
        *(
            "seed=[1",
            "seed={a=",
            'seed="unclosed',
            "name=a\x00b",
            "name=a\nb",
            "name=../../up",
            "name=/abs",
            "name=CON",
        ),
        *("name=" + "n" * 10_000, "name=\u0430dmin", "seed=" + "[" * 5000, "seed=" + "9" * 5000, "__class__.x=1"),
        *("algorithm.selection.__init__=3", "runs=[1]", "seed=1979-05-27", "algorithm.lr=!!python/object"),
    ],
    ids=lambda text: repr(text)[:24],
)
def test_hostile_overrides_are_refused(override: str) -> None:
    with pytest.raises(Invalid) as caught:
        config.load(None, [override])
    assert "\n" not in str(caught.value).strip() and "\x00" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("seed = ", "[a\n", "a = {b = 1", "seed = 1\nseed = 2", "\x00", "!!python/object/apply:os.system ['ls']"),
        *(
            "a = " + "[" * 3000 + "]" * 3000,
            "[" + ".".join("a" * 40) + "]\nb = 1",
            "# " + "x" * 2_000_000,
            "x: &a [*a]",
        ),
    ],
    ids=lambda text: repr(text)[:24],
)
def test_hostile_files_are_refused_with_their_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(Invalid, match=r"bad\.toml"):
        config.load(file)
    assert sorted(tmp_path.iterdir()) == [file]


def test_files_that_are_no_text_or_no_files(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Invalid, match=r"binary\.toml"):
        config.load(tmp_path / "binary.toml")
    with pytest.raises(Invalid, match="is a folder"):
        config.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        config.load(tmp_path / "absent.toml")


def test_a_tensor_option_cannot_come_from_a_config() -> None:
    with pytest.raises(Invalid, match=r"model.vectors .* only from Python"):
        config.load(None, ["model=text_lstm", "model.vectors=[1.0]"])


def test_reading_leaves_no_trace_of_the_value_as_code() -> None:
    assert toml_text.value("key", "__import__('os')") == "__import__('os')"


def test_a_tensor_of_a_file_can_be_named_on_the_command_line() -> None:
    given = ["data=array_files", "data.x=all.safetensors#x", "data.y=all.safetensors#y"]
    assert config.load(None, given).data.options["x"] == "all.safetensors#x"
    for comment in ("word #x", "word# x", "#x", "word#"):
        with pytest.raises(Invalid, match="cannot be read"):
            toml_text.value("key", comment)
