"""Python batches (CIFAR's pickle files), read by Python's unpickler without anything that could run code.

Names in the file are mapped to the few stand-ins below and never imported. Before unpickling, all instructions are
checked: only those that make containers, text, numbers and arrays are allowed, and none may ask for more memory than
the file has bytes (a number in a pickle can make the unpickler reserve gigabytes).
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.readers.files import read_bytes

MOST_BYTES = 1 << 30
MOST_INSTRUCTIONS = 1 << 22  # CIFAR-100's 50,000 pictures take a quarter of a million
LONGEST_NUMBER = 64  # bits; longer integers could be chosen to collide in a dict, which takes very long

ALLOWED = {
    *("PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
    *("FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
}
PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
NAMES = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): "array" for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "buffer" for core in ("core", "_core")},
    **{("numpy", "ndarray"): "ndarray", ("numpy", "dtype"): "dtype", ("_codecs", "encode"): "encode"},
}


def read_pickled(path: Path) -> Any:
    """The dicts, lists, numbers, text and arrays of a pickle file; anything that would run code is refused."""
    content = read_bytes(path, most=MOST_BYTES)
    try:
        end = _checked_end(content)
        # Between a MARK and a LIST, the file's own value must be the only one that it leaves behind.
        values = _Reader(b"(" + content[:end] + b"l.").load()
        if len(values) != 1:
            raise Invalid(f"it holds {len(values)} values, not one")
        return _data(values[0], {})
    except Invalid as problem:
        raise Invalid(f"{path} was refused: {problem}") from problem
    except Exception as problem:  # the unpickler raises whatever the damage leads to
        raise Invalid(f"{path} is not a readable Python batch ({problem}): it is damaged or cut off") from problem


def _checked_end(content: bytes) -> int:
    """The position of the STOP instruction, after checking all instructions before it."""
    for number, (instruction, argument, place) in enumerate(pickletools.genops(content)):
        name = instruction.name
        if name not in ALLOWED:
            raise Invalid(f"the instruction {name} is not allowed in a data file")
        if number > MOST_INSTRUCTIONS:
            raise Invalid(f"it has more than {MOST_INSTRUCTIONS:,} instructions")
        if name in PUTS and not 0 <= int(argument or 0) <= number:
            raise Invalid(f"it asks for memory for {argument} values after {number} instructions")
        if isinstance(argument, int) and argument.bit_length() > LONGEST_NUMBER:
            raise Invalid(f"it holds a whole number of {argument.bit_length()} bits")
        if name == "STOP":
            return int(place or 0)
    raise Invalid("it has no end mark")


class _Reader(pickle.Unpickler):
    """Python's unpickler, for which every name is a stand-in of ours."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")  # text of Python 2 is bytes
        self._encodable = len(content)

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for one of a few names of NumPy; nothing is imported."""
        role = NAMES.get((module, name))
        if role is None:
            raise Invalid(f"it asks for {module}.{name}; only numbers, text, lists, dicts and arrays are read")
        return _Name(role, self)

    def encoded(self, text: str, encoding: str) -> bytes:
        """What Python 2's bytes are pickled as; all of them together are no longer than the file."""
        self._encodable -= len(text)
        if encoding != "latin1" or self._encodable < 0:
            raise Invalid(f"it encodes {len(text):,} characters as {encoding}")
        return text.encode("latin-1")


class _Name:
    """A name the file mentions: what it makes when it is called."""

    __slots__ = ("reader", "role")

    def __init__(self, role: str, reader: _Reader) -> None:
        self.role, self.reader = role, reader

    def __call__(self, *arguments: Any) -> Any:
        if self.role == "array":
            _, _, _ = arguments  # kind, shape and type of an empty array
            return _Array()
        if self.role == "dtype":
            return _Dtype(_text(arguments[0]))
        if self.role == "buffer":
            content, dtype, shape, order = arguments
            return _Array(_array(content, dtype, shape, order == "F"))
        if self.role == "encode":
            return self.reader.encoded(*arguments)
        raise Invalid(f"it calls {self.role}, which makes no data")

    def __setstate__(self, state: Any) -> NoReturn:
        raise Invalid("it sets the state of a name; only arrays have one")


class _Dtype:
    """A number type: kind and bytes at first, the order of the bytes with a later instruction."""

    def __init__(self, code: str) -> None:
        if not re.fullmatch(r"[biuf][1248]", code):
            raise Invalid(f"arrays of type {code!r} are not read, only plain numbers")
        self.value = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise Invalid(f"the byte order {order!r} is unknown")
        self.value = np.dtype(order + self.value.str[1:])


class _Array:
    """An array, whose contents may come with a later instruction."""

    def __init__(self, value: np.ndarray | None = None) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        self.value = _array(content, dtype, shape, bool(fortran))


def _array(content: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray:
    """A view of the file's own bytes: no shape in it can ask for memory."""
    if not isinstance(content, (bytes, bytearray)) or not isinstance(dtype, _Dtype):
        raise Invalid(f"an array is made of bytes and a number type, not of {type(content).__name__}")
    return np.frombuffer(content, dtype.value).reshape(shape, order="F" if fortran else "C")


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _data(value: Any, seen: dict[int, Any]) -> Any:
    """The value with arrays in place of stand-ins; shared containers are walked once."""
    if isinstance(value, _Array) and value.value is not None:
        return value.value
    if isinstance(value, (_Name, _Dtype, _Array)):
        raise Invalid("it holds a Python type where data are expected")
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, tuple):
        seen[id(value)] = tuple(_data(item, seen) for item in value)
    elif isinstance(value, list):
        seen[id(value)] = value
        value[:] = [_data(item, seen) for item in value]
    elif isinstance(value, dict):
        seen[id(value)] = value
        for key, item in value.items():  # setting what is there already leaves the order alone
            if not isinstance(key, (str, bytes, int)):
                raise Invalid(f"a dict key must be text or a number, not {type(key).__name__}")
            value[key] = _data(item, seen)
    return seen.get(id(value), value)
