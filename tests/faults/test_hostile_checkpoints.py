"""Checkpoints written by an enemy are refused by name and reason, and nothing in them can run (FAULTS 46)."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broken_disk import quick_flushes  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_rounds import assert_whole, save_round, started

import consilience.experiments
import consilience.runs
from consilience.runs import canonical
from consilience.runs.checkpoint import CheckpointError, CorruptCheckpoint, load, load_latest
from consilience.runs.manifest import MOST_MANIFEST_BYTES, digest_of


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and sign it again, as somebody with write access could."""
    content = json.loads((path / "manifest.json").read_text())
    del content["digest"]
    content = change(content) or content
    (path / "manifest.json").write_bytes(canonical.encode(content | {"digest": digest_of(content)}, pretty=True))


def tree_with(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["trees"][0].update(values)


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name leaves the folder": tree_with(name="../../etc/passwd"),
    "name is absolute": tree_with(name="/etc/passwd"),
    "name with NUL": tree_with(name="a\0b"),
    "name is a number": tree_with(name=7),
    "name of another tree": tree_with(name="memory"),
    "two names that differ in capitals": lambda c: c["trees"].append(c["trees"][0] | {"name": "Server"}),
    "file with a path": tree_with(file="../x"),
    "absurd size": tree_with(bytes=10**15),
    "more absurd size": tree_with(bytes=10**30),
    "negative size": tree_with(bytes=-1),
    "size is true": tree_with(bytes=True),
    "size is text": tree_with(bytes="12"),
    "size is a fraction": tree_with(bytes=12.0),
    "digest too short": tree_with(sha256="ab"),
    "digest of nothing": tree_with(sha256=hashlib.sha256().hexdigest()),
    "digest is null": tree_with(sha256=None),
    "entries missing": lambda c: c["trees"][0].pop("entries") and None,
    "entries are text": tree_with(entries="model/w"),
    "entries are numbers": tree_with(entries=[1, 2]),
    "entry twice": lambda c: c["trees"][0]["entries"].append("round"),
    "entry that is not there": lambda c: c["trees"][0]["entries"].append("ghost"),
    "entry left out": lambda c: c["trees"][0]["entries"].pop() and None,
    "entry inside a tensor": lambda c: c["trees"][0]["entries"].append("round/inner/"),
    "entry without a name": lambda c: c["trees"][0]["entries"].append("//"),
    "deep entry": lambda c: c["trees"][0]["entries"].append("a/" * 100_000),
    "strides for another shape": tree_with(strides={"model/w": [1]}),
    "strides that overlap": tree_with(strides={"model/w": [0, 1]}),
    "strides that leave gaps": tree_with(strides={"model/w": [2**40, 2**50]}),
    "strides beyond all numbers": tree_with(strides={"model/w": [2**70, 1]}),
    "strides are text": tree_with(strides={"model/w": "31"}),
    "no trees": lambda c: c.pop("trees") and None,
    "trees are a mapping": lambda c: c.update(trees={}),
    "tree is null": lambda c: c["trees"].append(None),
    "facts are a list": lambda c: c.update(facts=[]),
    "extra entry": lambda c: c.update(code="import os"),
    "round is another": lambda c: c.update(round=3),
    "round is negative": lambda c: c.update(round=-2),
    "round is text": lambda c: c.update(round="2"),
    "round is true": lambda c: c.update(round=True),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_forged_manifests_with_valid_digests_are_refused(tmp_path: Path, kind: str) -> None:
    path = started(tmp_path) / "round-00000002"
    forge(path, FORGERIES[kind])
    with pytest.raises(CorruptCheckpoint) as refusal:
        load(path)
    message = str(refusal.value)
    assert str(path) in message and len(message) < 1000 and message.isprintable()
    assert assert_whole(load_latest(tmp_path)) == 1


@pytest.mark.parametrize("version", [3, 0, -1, "1", 1.0, True, None, [1]])
def test_an_unknown_format_is_refused_and_not_passed_over(tmp_path: Path, version: Any) -> None:
    path = started(tmp_path) / "round-00000002"
    forge(path, lambda content: content.update(format=version))
    for attempt in (lambda: load(path), lambda: load_latest(tmp_path)):
        with pytest.raises(CheckpointError, match=r"manifest\.json.*format") as refusal:
            attempt()
        assert not isinstance(refusal.value, CorruptCheckpoint)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"manifest"',
        b"\xff\xfe{}",
        b'{"format": NaN}',
        b'{"format": 1, "format": 1}',
        b'{"round": ' + b"9" * 5000 + b"}",
        b'{"round": 1e999}',
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 900 + b"]" * 900,
        b" " * (MOST_MANIFEST_BYTES + 1),
        b"cos\nsystem\n(S'echo'\ntR.",
    ],
    ids=range(15),
)
def test_hostile_manifest_texts_are_refused(tmp_path: Path, text: bytes) -> None:
    path = started(tmp_path) / "round-00000002"
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        load(path)


@pytest.mark.parametrize("depth", [100, 300, 500, 700, 900, 1100])
def test_nesting_that_can_be_read_but_not_written_is_refused(tmp_path: Path, depth: int) -> None:
    path = started(tmp_path) / "round-00000002"
    compact = b'{"facts":' + b'{"a":' * depth + b"1" + b"}" * depth + b',"format":1,"round":2,"trees":[]}'
    signed = compact[:-1] + b',"digest":"' + hashlib.sha256(compact).hexdigest().encode() + b'"}'
    (path / "manifest.json").write_bytes(signed)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        load(path)


def test_a_tensor_file_with_a_valid_digest_but_foreign_content_is_refused(tmp_path: Path) -> None:
    path = save_round(tmp_path, 1)
    header = b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    for data in (b"", b"PK\x03\x04zip", b"\x80\x04pickle.", len(header).to_bytes(8, "little") + header, b"\xff" * 64):
        (path / "server.safetensors").write_bytes(data)
        forge(path, tree_with(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
        with pytest.raises(CorruptCheckpoint, match=r"server\.safetensors"):
            load(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_any_node_of_a_manifest_replaced_by_anything_loads_whole_or_is_refused(tmp_path: Path) -> None:
    path = save_round(tmp_path, 1)
    original, outcomes = (path / "manifest.json").read_bytes(), []

    @settings(max_examples=250, deadline=None)
    @given(value=JSON, data=st.data())
    def try_one(value: Any, data: st.DataObject) -> None:
        (path / "manifest.json").write_bytes(original)
        where: list[Any] = []

        def replace_some_node(content: dict[str, Any]) -> None:
            node: Any = content
            while True:
                keys = list(node) if isinstance(node, dict) else list(range(len(node)))
                where.append(data.draw(st.sampled_from(keys)))
                inner = node[where[-1]]
                if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
                    node[where[-1]] = value
                    return
                node = inner

        forge(path, replace_some_node)
        try:
            found = load(path)
        except CheckpointError as problem:
            assert "round-00000001" in str(problem)
            outcomes.append((where[0], "refused"))
        else:  # only facts may say anything, and the tensors are the ones whose digests were listed
            assert set(found.trees) <= {"server", "memory"} and found.round == 1
            outcomes.append((where[0], "loaded"))

    try_one()
    assert ("facts", "loaded") in outcomes and ("trees", "refused") in outcomes, set(outcomes)


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "dangling link", "device"])
@pytest.mark.parametrize("name", ["manifest.json", "server.safetensors"])
def test_things_that_are_no_files_are_refused_without_waiting(tmp_path: Path, name: str, what: str) -> None:
    path = save_round(tmp_path, 1)
    file, copy = path / name, tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to({"link": copy, "device": Path("/dev/zero")}.get(what, tmp_path / "nowhere"))
    with pytest.raises(CorruptCheckpoint, match=name):
        load(path)


def test_no_code_can_come_from_data() -> None:
    """FAULTS G20 for what reads run folders: no pickle, no torch.load, no eval, no unsafe YAML."""
    forbidden_modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
    packages = [Path(package.__path__[0]) for package in (consilience.runs, consilience.experiments)]
    files = [file for package in packages for file in package.rglob("*.py")]
    assert {"tree_file.py", "manifest.py", "checkpoint.py", "live_run.py"} <= {file.name for file in files}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not {module.split(".")[0] for module in modules} & forbidden_modules, file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "compile", "torch.load", "__import__"}, (file, called)
