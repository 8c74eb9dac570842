"""One array format, read strictly: exact both ways, and nothing hostile gets as far as an allocation."""

from __future__ import annotations

import io
import random
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from consilience.core import tree
from consilience.core.refusal import Refused
from consilience.wire.arrays import Packed, digest, from_bytes, to_bytes
from consilience.wire.template import Template

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every bit pattern may come up, NaN and infinities included."""
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).bool()
    count = int(np.prod(shape)) * dtype.itemsize
    octets = torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)
    return octets.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def bits(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def saved(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), **options)
    return file.getvalue()


def header(text: str, version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    octets = text.encode("latin-1")
    size = len(octets) if length is None else length
    return b"\x93NUMPY" + bytes(version) + size.to_bytes(2 if version[0] == 1 else 4, "little") + octets


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,), (2, 3), (2, 3, 4, 5)], ids=str)
def test_every_bit_comes_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sent = values(shape, dtype)
    packed = to_bytes(sent)
    assert packed == (packed.data, str(dtype).removeprefix("torch."), shape)
    back = from_bytes(packed.data, packed.shape, packed.dtype)
    assert back.shape == sent.shape and back.dtype == dtype and bits(back) == bits(sent)
    assert back.is_contiguous()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=5), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_every_shape_comes_back_and_numpy_reads_the_same(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    sent = values(tuple(shape), dtype, seed)
    packed = to_bytes(sent)
    assert bits(from_bytes(*(packed.data, packed.shape, dtype))) == bits(sent)
    array = np.load(io.BytesIO(packed.data), allow_pickle=False)
    assert array.shape == tuple(shape) and array.tobytes() == bits(sent)
    assert len(packed.data) - array.nbytes <= 256 and (len(packed.data) - array.nbytes) % 64 == 0


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_what_numpy_writes_is_read(version: tuple[int, int]) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert from_bytes(saved(array, version=version), (2, 3), "float32").tolist() == array.tolist()
    assert from_bytes(saved(array.T, version=version), (3, 2), "float32").tolist() == array.T.tolist()  # columns first
    assert from_bytes(saved(np.float32(2.5)), (), "float32").item() == 2.5
    assert from_bytes(memoryview(saved(array)), (2, 3), "float32").tolist() == array.tolist()


def test_tensors_that_are_not_rows_of_memory_are_sent_by_value() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    for view in (base.permute(2, 0, 1), base[:, 1], base.expand(5, 2, 3, 4), base[:, :, ::2], base[0, 0, :1].expand(1)):
        packed = to_bytes(view)
        assert torch.equal(from_bytes(packed.data, packed.shape, packed.dtype), view)


def test_bfloat16_travels_as_its_bits_under_its_name() -> None:
    sent = torch.tensor([1.0, 2**-126, -3.0e38, 1 + 2**-7], dtype=torch.bfloat16)
    packed = to_bytes(sent)
    assert packed.dtype == "bfloat16" and np.load(io.BytesIO(packed.data)).dtype == np.uint16
    assert torch.equal(from_bytes(packed.data, (4,), "bfloat16"), sent)


GOOD = saved(np.zeros((3, 2), np.float32))
HEAD = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }\n"


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code ran",))


def npz() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(1_000_000))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (saved(np.zeros((), np.float32)), "shape", r"expected \(3, 2\), received \(\)"),
        (saved(np.zeros((1, 2), np.float32)), "shape", r"received \(1, 2\)"),
        (saved(np.zeros((2, 3), np.float32)), "shape", r"received \(2, 3\)"),
        (saved(np.zeros((3, 2, 1), np.float32)), "shape", r"received \(3, 2, 1\)"),
        (saved(np.zeros((3, 2), np.float64)), "dtype", "expected float32, received NumPy's <f8"),
        (saved(np.zeros((3, 2), np.float16)), "dtype", "received NumPy's <f2"),
        (saved(np.zeros((3, 2), np.int32)), "dtype", "received NumPy's <i4"),
        (saved(np.zeros((3, 2), np.complex64)), "dtype", "<c8"),
        (saved(np.zeros((3, 2), ">f4")), "dtype", ">f4"),
        (saved(np.zeros((3, 2), "U4")), "dtype", "<U4"),
        (saved(np.zeros((3, 2), "S4")), "dtype", r"\|S4"),
        (saved(np.zeros((3, 2), "M8[s]")), "dtype", "M8"),
        (saved(np.zeros((3, 2), "V4")), "dtype", "V4"),
        (saved(np.zeros((3, 2), [("a", "<f4")])), "dtype", r"\[\('a'"),
        (saved(np.array([Bomb()] * 6, dtype=object).reshape(3, 2), allow_pickle=True), "dtype", r"\|O"),
        (npz(), "format", r"zip container \(\.npz\)"),
        (b"PK\x03\x04", "format", "zip container"),
        (b"", "format", "not an .npy array"),
        (b"\x93NUMPY\x01\x00", "format", "not an .npy array"),
        (b"\x80\x04\x95" + bytes(40), "format", "not an .npy array"),  # a pickle
        (GOOD[:-1], "size", "expected 24 bytes after the header, received 23"),
        (GOOD + b"\0", "size", "received 25"),
        (GOOD[:100], "format", "header"),
        (GOOD + bytes(10_000), "size", "expected 24 bytes and a header, received"),
        (saved(np.zeros((3, 2), np.float32), version=(3, 0)), "format", "version 3.0"),
        (header(HEAD, version=(1, 1)), "format", "version 1.1"),
        (header(HEAD, version=(2, 0), length=2**32 - 1), "format", "a header of 4,294,967,295 bytes"),
        (header(HEAD.replace("(3, 2)", "(1000000000000000,)")) + bytes(24), "shape", r"received \(1000000000000000,\)"),
        (header(HEAD.replace("(3, 2)", "(3, 02)")) + bytes(24), "format", "header that is not allowed"),
        (header(HEAD.replace("(3, 2)", "(3, -2)")) + bytes(24), "format", "header that is not allowed"),
        (header(HEAD.replace("(3, 2)", "(3, 2.0)")) + bytes(24), "format", "header that is not allowed"),
        (header(HEAD.replace("(3, 2)", "(True, 2)")) + bytes(24), "format", "header that is not allowed"),
        (header(HEAD.replace("(3, 2)", "(3,) * 2")) + bytes(24), "format", "header that is not allowed"),
        (header(HEAD.replace("False", "0")) + bytes(24), "format", "header that is not allowed"),
        (header(HEAD.replace(", }", ", 'x': 1, }")) + bytes(24), "format", "header that is not allowed"),
        (header(HEAD[:-1] + "\n\n") + bytes(24), "format", "header that is not allowed"),
        (header("__import__('os').abort()\n") + bytes(24), "format", "header that is not allowed"),
        (header("(" * 4000 + "\n") + bytes(24), "format", "header that is not allowed"),
        ("text", "format", "str is not bytes"),
        (None, "format", "NoneType is not bytes"),
    ],
)
def test_anything_else_is_refused_in_words(data: Any, reason: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as problem:
        from_bytes(data, (3, 2), "float32")
    assert problem.value.reason == reason and "\n" not in str(problem.value)


def test_flags_are_0_or_1() -> None:
    good = to_bytes(torch.tensor([True, False, True])).data
    with pytest.raises(Refused, match="neither 0 nor 1"):
        from_bytes(good[:-1] + b"\2", (3,), "bool")


@pytest.mark.parametrize("name", ["complex64", "object", "U4", "", "float32 ", 4, None, torch.complex64])
def test_types_that_cannot_be_sent(name: Any) -> None:
    with pytest.raises(Refused) as problem:
        from_bytes(GOOD, (3, 2), name)
    assert problem.value.reason == "dtype"
    with pytest.raises(ValueError, match="complex64 cannot be sent"):
        to_bytes(torch.zeros(1, dtype=torch.complex64))


@pytest.mark.parametrize("count", [10**9, 10**15, 10**18])
def test_a_header_that_claims_much_allocates_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = header(HEAD.replace("(3, 2)", f"({count},)")) + bytes(24)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was asked for"))
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            from_bytes(data, (3, 2), "float32")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


# --- digests ---------------------------------------------------------------------------------------------------------

REPLY = {"model": {"params": {"w": torch.arange(6.0).reshape(3, 2)}, "buffers": {}}, "loss": torch.tensor(0.5)}


def test_a_digest_is_of_values_names_types_shapes_and_facts() -> None:
    known = digest(REPLY, "run", 3)
    other_order = {"loss": REPLY["loss"], "model": {"buffers": {}, "params": REPLY["model"]["params"]}}
    assert digest(other_order, "run", 3) == known and digest(tree.clone(REPLY), "run", 3) == known
    w = REPLY["model"]["params"]["w"]
    changed = w.clone()
    changed.view(torch.int32)[2, 1] ^= 1  # one bit
    others = [
        digest(REPLY, "run", 4),
        digest(REPLY, "run"),
        digest(REPLY, "run3"),
        *(
            digest({**REPLY, "model": {"params": {name: value}}}, "run", 3)
            for name, value in (("v", w), ("w", w.T.contiguous()), ("w", w.double()), ("w", changed), ("w", -0.0 * w))
        ),
    ]
    assert len({known, *others}) == len(others) + 1


# --- fuzz (FAULTS G4) ------------------------------------------------------------------------------------------------

TEMPLATE = Template.of({**REPLY, "seen": torch.tensor([True, False]), "steps": torch.tensor(7)})


def mutated(good: bytes, draw: random.Random) -> bytes:
    """Flips, cuts, insertions, swaps and digits of the header changed: what a broken or hostile sender could send."""
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place, kind = draw.randrange(len(data) or 1), draw.randrange(7)
        if kind == 0 and data:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[place] = draw.randrange(256)
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            data[place:place] = draw.randbytes(draw.randrange(1, 9))
        elif kind == 4:
            del data[place : place + draw.randrange(1, 9)]
        elif kind == 5:
            digits = [i for i, octet in enumerate(data[:128]) if octet in b"0123456789"]
            if digits:
                data[draw.choice(digits)] = draw.choice(b"0123456789")
        else:
            for old, new in ((b"<f4", b"<f8"), (b"False", b"True "), (b"(", b"(9,"), (b"'descr'", b"'Descr'")):
                if draw.random() < 0.3:
                    data = data.replace(old, new, 1)
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_bytes_are_refused_or_fit(seed: int) -> None:
    """20,000 mutations each: no other exception, and what is accepted has the expected shape, type and values."""
    draw = random.Random(seed)
    goods = [to_bytes(values(shape, dtype, seed)) for shape, dtype in (((3, 2), torch.float32), ((), torch.int64))]
    goods += [
        to_bytes(values((2, 0), torch.float64)),
        to_bytes(values((9,), torch.bool)),
        Packed(GOOD, "float32", (3, 2)),
    ]
    accepted = 0
    for number in range(20_000):
        good = goods[number % len(goods)]
        data = mutated(good.data, draw)
        try:
            value = from_bytes(data, good.shape, good.dtype)
        except Refused as problem:
            assert problem.reason in {"format", "dtype", "shape", "size", "value"} and "\n" not in str(problem)
            continue
        accepted += 1
        assert tuple(value.shape) == good.shape and str(value.dtype) == f"torch.{good.dtype}"
        # what the bytes say by NumPy's own reader, whose header rules are looser
        assert np.load(io.BytesIO(data), allow_pickle=False).tobytes() == bits(value)
    assert 0 < accepted < 20_000


def test_mutated_replies_are_refused_or_fit() -> None:
    """20,000 mutations of whole replies: names, types, shapes and bytes; what gets in passes the schema, finite."""
    draw = random.Random(9)
    good = TEMPLATE.pack({**REPLY, "seen": torch.tensor([True, False]), "steps": torch.tensor(7)})
    reasons: set[str] = set()
    for _ in range(20_000):
        reply: dict[Any, Any] = dict(good)
        name = draw.choice(list(reply))
        item, kind = reply[name], draw.randrange(8)
        if kind == 0:
            del reply[name]
        elif kind == 1:
            reply[draw.choice(["x", name + "/", "../" + name, "", 3, name.upper(), "a\nb"])] = item
        elif kind == 2:
            reply[name] = item._replace(dtype=draw.choice(["float64", "int64", "bool", "object", None, 3, "bfloat16"]))
        elif kind == 3:
            reply[name] = item._replace(
                shape=draw.choice([(), (1,), (1, 2), (3, 2), (2**40,), [3, 2], (True, 2), None, (-1,)])
            )
        elif kind == 4:
            reply[name] = draw.choice([None, b"", (b"",), ("a", "float32", ()), 7])
        elif kind == 5:  # any bits at all as values, behind a sound header
            octets = int(np.prod(item.shape)) * getattr(torch, item.dtype).itemsize
            values = draw.choice([draw.randbytes(octets), b"\xff" * octets, (b"\x00\x00\x80\x7f" * octets)[:octets]])
            reply[name] = item._replace(data=item.data[: len(item.data) - octets] + values)
        else:
            reply[name] = item._replace(data=mutated(item.data, draw))
        try:
            back, casts = TEMPLATE.check_casting(TEMPLATE.read(reply))
        except Refused as problem:
            reasons.add(problem.reason)
            assert "\n" not in str(problem)
            continue
        assert Template.of(back) == TEMPLATE and casts == () and tiny.finite(back)
    assert reasons == {"missing_key", "unknown_key", "dtype", "shape", "format", "size", "value", "nonfinite"}


def test_hostile_replies_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is claimed or sent, no tensor is made and the rise stays below twice the size of the model."""
    model = {"w": torch.zeros(250_000)}  # 1 MB
    template = Template.of(model)
    good = template.pack(model)["w"]
    claims = [
        Packed(header(HEAD.replace("(3, 2)", "(10000000000,)")) + bytes(1_000_000), "float32", (10**10,)),
        Packed(header(HEAD.replace("(3, 2)", "(10000000000,)")) + bytes(1_000_000), "float32", (250_000,)),
        Packed(npz(), "float32", (250_000,)),
        good._replace(dtype="float64"),
        good._replace(data=good.data[:-4]),
        good._replace(data=good.data + bytes(4)),
        good._replace(data=bytes(8_000_000)),
    ]
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was asked for"))
    for claim in claims:
        tracemalloc.start()
        try:
            with pytest.raises(Refused):
                template.read({"w": claim})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2 * template.nbytes
