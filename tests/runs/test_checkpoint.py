"""Checkpoints give back exactly what was saved: bits, types, shapes, strides, order, empty subtrees."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.runs import checkpoint, manifest, tree_file
from consilience.runs.checkpoint import CorruptCheckpoint, generations, load, load_latest, save
from consilience.runs.disk import disk

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy())


def assert_same(a: Any, b: Any, place: str = "") -> None:
    """Equal structure in equal order, and tensors equal to the last bit."""
    if isinstance(a, dict):
        assert isinstance(b, dict) and list(a) == list(b), place
        for key in a:
            assert_same(a[key], b[key], f"{place}/{key}")
        return
    assert a.dtype == b.dtype and a.shape == b.shape, place
    assert bits(a.detach()) == bits(b), place


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_value_that_was_changed_is_found_by_its_digest(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"server": {"w": torch.ones(4)}})
    file = path / "server.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1  # the file can be parsed as before, and is as long
    file.write_bytes(changed)
    with pytest.raises(CorruptCheckpoint, match=r"server\.safetensors.*SHA-256"):
        load(path)


def test_every_tensor_starts_at_a_multiple_of_its_element_size() -> None:
    """Whatever the names: readers that map a file need it."""
    tree = {f"{place}": torch.ones(3, dtype=dtype) for place, dtype in enumerate((*DTYPES, *reversed(DTYPES)))}
    data = b"".join(bytes(chunk) for chunk in tree_file.chunks(tree_file.describe(tree, "odd")[0]))
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        assert (8 + length + entry["data_offsets"][0]) % tree[name].element_size() == 0, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_every_type_and_shape_round_trips(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    tensor = raw.flatten().view(dtype).reshape(shape)  # random bits: NaNs with payloads, subnormals, minus zero
    tree = {"a": {"b": tensor}, "c": torch.tensor(1)}
    assert_same(tree, load(save(tmp_path, 3, {"server": tree})).trees["server"])


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    pattern = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x00000001, 0x7F800000], dtype=torch.int64)
    floats = pattern.to(torch.int32).view(torch.float32)  # quiet and signalling NaN, -0.0, subnormal, inf
    loaded = load(save(tmp_path, 0, {"t": {"x": floats}})).trees["t"]["x"]
    assert loaded.view(torch.int32).tolist() == pattern.to(torch.int32).tolist()


def test_order_of_keys_and_of_trees_and_empty_subtrees_stay(tmp_path: Path) -> None:
    one = torch.ones(1)
    trees = {
        "zeta": {"z": one, "a": {}, "m": {"y": one, "b": {"deep": {}}, "a": one}, "0": one},
        "alpha": {},
        "pool": {"only": {}},
    }
    loaded = load(save(tmp_path, 1, trees)).trees
    assert_same(trees, loaded)
    assert list(loaded) == ["zeta", "alpha", "pool"]
    assert list(loaded["zeta"]["m"]) == ["y", "b", "a"] and loaded["zeta"]["m"]["b"] == {"deep": {}}


def test_no_trees_at_all(tmp_path: Path) -> None:
    found = load(save(tmp_path, 0, {}, {"seed": 1}))
    assert found.trees == {} and found.facts == {"seed": 1} and found.round == 0


def test_tied_tensors_become_copies_and_views_are_cut_out(tmp_path: Path) -> None:
    table = torch.arange(12.0).reshape(3, 4)
    tree = {"in": table, "out": table, "row": table[1], "column": table[:, 2], "wide": table[:1].expand(5, 4)}
    path = save(tmp_path, 0, {"t": tree})
    loaded = load(path).trees["t"]
    assert_same(tree, loaded)
    loaded["in"].zero_()
    assert loaded["out"].sum() == table.sum() and loaded["row"].sum() == table[1].sum()
    assert (path / "t.safetensors").stat().st_size < 48 * 2 + 16 + 12 + 80 + 600  # copies, not whole storages


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(64, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(5, 7).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(1, 4).as_strided((1, 4), (999, 1)),
    ],
    ids=["channels-last", "channels-last-1x1", "transposed", "permuted", "odd-stride"],
)
def test_memory_order_is_kept_because_kernels_depend_on_it(tmp_path: Path, tensor: torch.Tensor) -> None:
    loaded = load(save(tmp_path, 0, {"t": {"x": tensor}})).trees["t"]["x"]
    assert loaded.stride() == tensor.stride() and torch.equal(loaded, tensor)


def test_loaded_tensors_are_aligned_like_fresh_ones(tmp_path: Path) -> None:
    tree = {str(i): torch.randn(i, generator=torch.Generator().manual_seed(i)) for i in range(1, 40)}
    loaded = load(save(tmp_path, 0, {"t": tree})).trees["t"]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.values())


def test_parameters_that_require_gradients_are_saved_without(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    loaded = load(save(tmp_path, 0, {"t": {"w": weight, "grown": weight * 2}})).trees["t"]
    assert not loaded["w"].requires_grad and torch.equal(loaded["w"], weight.detach())


def test_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    tree = {"b": {'é\n"': torch.randn(3, dtype=torch.float64)}, "a": torch.tensor([True]), "n": torch.empty(0, 2)}
    path = save(tmp_path, 0, {"t": tree})
    flat = safetensors.torch.load_file(path / "t.safetensors")
    assert set(flat) == {'b/é\n"', "a", "n"} and torch.equal(flat['b/é\n"'], tree["b"]['é\n"'])


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**31))
    tensor = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    return tensor[::2] if tensor.dim() and draw(st.booleans()) else tensor


KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=6).filter(
    lambda key: key != "__metadata__"
)
TREES = st.dictionaries(
    KEYS, st.recursive(tensors(), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=6)
)


@settings(max_examples=120, deadline=None)
@given(tree=TREES)
def test_any_tree_round_trips_through_the_file_format(tree: dict[str, Any]) -> None:
    flat, layout = tree_file.describe(tree, "t")
    data = b"".join(bytes(chunk) for chunk in tree_file.chunks(flat))
    assert data == b"".join(bytes(chunk) for chunk in tree_file.chunks(dict(reversed(flat.items()))))
    assert_same(tree, tree_file.restore(data, layout))


def test_equal_trees_give_equal_bytes(tmp_path: Path) -> None:
    def trees(order: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5)
        return {"server": {"w": torch.randn(4, 3, generator=generator), "n": torch.tensor(order * 0)}}

    first = save(tmp_path / "one", 7, trees(1), {"b": [1, 2.5, None], "a": "x"})
    second = save(tmp_path / "two", 7, trees(2), {"a": "x", "b": (1, 2.5, None)})
    assert files_of(first) == files_of(second)


def test_the_manifest_says_what_was_written(tmp_path: Path) -> None:
    path = save(tmp_path, 12, {"server": {"w": torch.ones(2)}}, {"metrics": {"bytes": 10}})
    assert path == tmp_path / "round-00000012"
    written = json.loads((path / "manifest.json").read_text())
    data = (path / "server.safetensors").read_bytes()
    assert written["format"] == 2 and written["round"] == 12 and written["facts"] == {"metrics": {"bytes": 10}}
    assert written["trees"][0]["sha256"] == hashlib.sha256(data).hexdigest()
    assert written["trees"][0]["bytes"] == len(data)
    digest = written.pop("digest")
    compact = json.dumps(written, sort_keys=True, separators=(",", ":")).encode()
    assert digest == hashlib.sha256(compact).hexdigest()


def test_facts_come_back_as_they_were(tmp_path: Path) -> None:
    facts = {"float": 0.1 + 0.2, "big": 2**127 + 1, "text": "line\nbreak \ud800 é", "none": None, "list": [True, {}]}
    assert load(save(tmp_path, 0, {}, facts)).facts == facts


@pytest.mark.parametrize(
    ("trees", "facts", "words"),
    [
        ({"../evil": {}}, {}, "tree name"),
        ({"a": {}, "A": {}}, {}, "capitals"),
        ({"t": [torch.ones(1)]}, {}, "nested dicts"),
        ({"t": {"x": {"y": 3.0}}}, {}, "at x/y is float"),
        ({"t": {"x/y": torch.ones(1)}}, {}, "x/y"),
        ({"t": {"": torch.ones(1)}}, {}, "non-empty"),
        ({"t": {3: torch.ones(1)}}, {}, "keys are"),
        ({"t": {"\ud800": torch.ones(1)}}, {}, "Unicode"),
        ({"t": {"__metadata__": torch.ones(1)}}, {}, "__metadata__"),
        ({"t": {"x": torch.ones(1, dtype=torch.complex128)}}, {}, "complex128"),
        ({"t": {"x": torch.ones(2, 2).to_sparse()}}, {}, "sparse"),
        ({"t": {"x": torch.ones(2, device="meta")}}, {}, "without data"),
        ({}, {"loss": float("nan")}, "facts.loss"),
        ({}, {"a": {"b": [0, {1: 2}]}}, "facts.a.b[1]"),
        ({}, {"a": object()}, "facts.a is object"),
        ({}, {"n": 1 << 5000}, "facts.n"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_the_disk_is_touched(
    tmp_path: Path, trees: dict[str, Any], facts: dict[Any, Any], words: str
) -> None:
    with pytest.raises(Invalid) as refusal:
        save(tmp_path / "new", 0, trees, facts)
    assert words in str(refusal.value)
    assert not (tmp_path / "new").exists()


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    tree["loop"] = tree
    with pytest.raises(Invalid, match="nested"):
        save(tmp_path, 0, {"t": tree})


def test_a_manifest_too_long_to_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, small(1))
    monkeypatch.setattr(manifest, "MOST_MANIFEST_BYTES", 5000)
    with pytest.raises(Invalid, match="a manifest at most 5000"):
        save(tmp_path, 2, small(2), {"history": list(range(5000))})
    assert names(tmp_path) == ["round-00000001"]


@pytest.mark.parametrize(("round", "keep"), [(-1, 2), (10**18, 2), (1.5, 2), (True, 2), (0, 0), (0, -1)])
def test_rounds_and_keep_are_checked(tmp_path: Path, round: Any, keep: Any) -> None:
    with pytest.raises(Invalid, match=r"^round = " if keep == 2 else r"^keep = "):
        save(tmp_path, round, {}, keep=keep)
    assert names(tmp_path) == []


def small(round: int) -> dict[str, Any]:
    return {"server": {"w": torch.full((3,), float(round))}}


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_generations_are_kept(tmp_path: Path, keep: int) -> None:
    for round in (1, 2, 5, 9, 10):
        save(tmp_path, round, small(round), keep=keep)
    assert names(tmp_path) == [f"round-{r:08d}" for r in (1, 2, 5, 9, 10)[-keep:]]
    assert [checkpoint.round_of(path) for path in generations(tmp_path)] == [1, 2, 5, 9, 10][-keep:]


def test_rounds_are_ordered_by_number_not_by_spelling(tmp_path: Path) -> None:
    for round in (99_999_999, 100_000_000):
        save(tmp_path, round, small(0))
    found = load_latest(tmp_path)
    assert found is not None and found.round == 100_000_000


def test_nothing_saved_yet(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None
    assert load_latest(tmp_path / "absent") is None
    (tmp_path / "round-1").mkdir()
    (tmp_path / "round-00000002.x").mkdir()
    assert load_latest(tmp_path) is None


def test_saving_a_round_again_never_overwrites_and_the_last_attempt_counts(tmp_path: Path) -> None:
    save(tmp_path, 1, small(1))
    save(tmp_path, 2, small(2))
    again = save(tmp_path, 2, small(22))
    assert again.name == "round-00000002.2"
    found = load_latest(tmp_path)
    assert found is not None and found.round == 2 and found.trees["server"]["w"][0] == 22
    assert names(tmp_path) == ["round-00000001", "round-00000002.2"]  # two rounds, not two attempts


def test_going_back_to_an_earlier_round_makes_it_the_latest(tmp_path: Path) -> None:
    for round in (3, 6, 9):
        save(tmp_path, round, small(round), keep=3)
    save(tmp_path, 4, small(44), keep=3)
    found = load_latest(tmp_path)
    assert found is not None and found.round == 4
    assert names(tmp_path) == ["round-00000003", "round-00000004"]


def test_a_damaged_generation_does_not_use_up_a_place(tmp_path: Path) -> None:
    for round in (1, 2):
        save(tmp_path, round, small(round))
    (tmp_path / "round-00000002" / "manifest.json").write_text("{")
    found = load_latest(tmp_path)
    assert found is not None and found.round == 1
    assert len(found.skipped) == 1 and "round-00000002" in found.skipped[0] and "manifest.json" in found.skipped[0]
    save(tmp_path, 2, small(2))
    assert names(tmp_path) == ["round-00000001", "round-00000002.2"]


def test_drafts_of_a_crash_are_removed_and_foreign_files_are_not(tmp_path: Path) -> None:
    (tmp_path / ".round-00000001.tmp-4242").mkdir()
    (tmp_path / ".round-00000001.tmp-4242" / "server.safetensors").write_bytes(b"half")
    (tmp_path / ".notes.tmp-1").mkdir()
    (tmp_path / "README").write_text("mine")
    save(tmp_path, 1, small(1))
    assert names(tmp_path) == [".notes.tmp-1", "README", "round-00000001"]


def test_parents_are_made_and_unlisted_files_are_ignored(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "b", 1, small(1))
    (path / "intruder.safetensors").write_bytes(b"not mine")
    (path / ".DS_Store").write_bytes(b"x")
    assert list(load(path).trees) == ["server"]


def test_a_copy_under_another_name_loads(tmp_path: Path) -> None:
    path = save(tmp_path, 1, small(1)).rename(tmp_path / "best")
    assert load(path).round == 1


def test_a_reader_that_is_overtaken_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, small(1), keep=1)
    real, moved = checkpoint.load, []

    def overtaken(path: Path) -> checkpoint.Checkpoint:
        if not moved:
            moved.append(save(tmp_path, 2, small(2), keep=1))
        return real(path)

    monkeypatch.setattr(checkpoint, "load", overtaken)
    found = load_latest(tmp_path)
    assert found is not None and found.round == 2 and found.skipped == ()


def test_old_generations_that_cannot_be_removed_do_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(folder: Path) -> None:
        raise OSError(16, "Device or resource busy", str(folder))

    monkeypatch.setattr(disk, "remove_folder", stuck, raising=False)
    with caplog.at_level(logging.WARNING):
        for round in (1, 2, 3):
            save(tmp_path, round, small(round))
    assert "busy" in caplog.text and "round-00000001" in caplog.text
    monkeypatch.undo()
    save(tmp_path, 4, small(4))
    assert names(tmp_path) == ["round-00000003", "round-00000004"]


def test_other_byte_orders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(Invalid, match="little-endian"):
        save(tmp_path, 0, {"t": {}})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    tensor = torch.randn(4, 5, device="cuda", dtype=torch.bfloat16).t()
    loaded = load(save(tmp_path, 0, {"t": {"x": tensor}})).trees["t"]["x"]
    assert loaded.device.type == "cpu" and torch.equal(loaded, tensor.cpu()) and loaded.stride() == tensor.stride()
