"""Python batches (CIFAR's pickle files), read by a machine that knows containers, text and arrays and nothing else.

No name in the file is ever imported or called: an instruction that is not one of the few below is refused.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.readers.files import read_bytes

LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
OLD_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # Python 2 text: bytes
CONSTANTS: dict[str, Callable[[], Any]] = {
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False},
    **{"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple},
}
PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
GETS = {"GET", "BINGET", "LONG_BINGET"}
IGNORED = {"PROTO", "FRAME"}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
NAMES = {
    **{(module, "_reconstruct"): "array" for module in MULTIARRAY},
    **{("numpy.core.numeric", "_frombuffer"): "buffer", ("numpy._core.numeric", "_frombuffer"): "buffer"},
    **{("numpy", "ndarray"): "ndarray", ("numpy", "dtype"): "dtype", ("_codecs", "encode"): "encode"},
}
MARK = object()


@dataclass
class _Name:
    """A name the file mentions; only its place in `NAMES` is ever used."""

    role: str


@dataclass
class _Dtype:
    """A number type: kind, bytes and order."""

    code: str
    order: str = "="


@dataclass
class _Array:
    """An array whose contents come with a later BUILD instruction."""

    value: np.ndarray | None = None


@dataclass
class _Machine:
    """The stack and memory of the reading machine."""

    stack: list[Any] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)

    def pop_to_mark(self) -> list[Any]:
        """Everything pushed since the last MARK."""
        top = len(self.stack) - 1 - self.stack[::-1].index(MARK)
        items, self.stack[top:] = self.stack[top + 1 :], []
        return items

    def step(self, name: str, argument: Any) -> None:
        """Carry out one instruction."""
        stack = self.stack
        if name in LITERALS:
            stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif name in OLD_STRINGS:
            stack.append(argument.encode("latin-1"))
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name]())
        elif name in PUTS:
            self.memory[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memory[len(self.memory)] = stack[-1]
        elif name in GETS:
            stack.append(self.memory[int(argument)])
        elif name == "MARK":
            stack.append(MARK)
        elif name in TUPLES:
            stack[-TUPLES[name] :] = [tuple(stack[-TUPLES[name] :])]
        elif name in ("TUPLE", "LIST"):
            items = self.pop_to_mark()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name == "DICT":
            items = self.pop_to_mark()
            stack.append({})
            _put_items(stack[-1], items)
        else:
            self.step_inward(name, argument)

    def step_inward(self, name: str, argument: Any) -> None:
        """Instructions that fill a container or make an array."""
        stack = self.stack
        if name in ("APPENDS", "APPEND"):
            items = self.pop_to_mark() if name == "APPENDS" else [stack.pop()]
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEMS", "SETITEM"):
            items = self.pop_to_mark() if name == "SETITEMS" else [stack.pop() for _ in range(2)][::-1]
            _put_items(_expect(stack[-1], dict), items)
        elif name == "GLOBAL":
            stack.append(_named(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(module, attribute))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_reduce(_expect(called, _Name).role, _expect(arguments, tuple)))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif name not in IGNORED:
            raise Invalid(f"the instruction {name} is not allowed in a data file")


def read_pickled(path: Path) -> Any:
    """The dicts, lists, numbers, text and arrays of a pickle file; anything that would run code is refused."""
    content = read_bytes(path)
    machine = _Machine()
    try:
        for instruction, argument, _ in pickletools.genops(content):
            if instruction.name == "STOP":
                (result,) = machine.stack
                return _settle(result, {})
            machine.step(instruction.name, argument)
    except Invalid as problem:
        raise Invalid(f"{path} was refused: {problem}") from problem
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as problem:
        raise Invalid(f"{path} is not a readable Python batch ({problem}): it is damaged or cut off") from problem
    raise Invalid(f"{path} is cut off: it has no end mark")


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise Invalid(f"a {kind.__name__.strip('_')} was expected where the file has a {type(value).__name__}")
    return value


def _put_items(target: dict[Any, Any], items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, bytes, int)):
            raise Invalid(f"a dict key must be text or a number, not {type(key).__name__}")
        target[key] = value


def _named(module: Any, attribute: Any) -> _Name:
    role = NAMES.get((module, attribute)) if isinstance(module, str) else None
    if role is None:
        raise Invalid(f"it asks for {module}.{attribute}; only numbers, text, lists, dicts and arrays are read")
    return _Name(role)


def _reduce(role: str, arguments: tuple[Any, ...]) -> Any:
    if role == "array":
        return _Array()
    if role == "dtype":
        code = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        if not re.fullmatch(r"[biuf][1248]", code):
            raise Invalid(f"arrays of type {code!r} are not read, only plain numbers")
        return _Dtype(code)
    if role == "encode" and tuple(arguments[1:]) == ("latin1",):
        return arguments[0].encode("latin-1")
    if role == "buffer":
        content, dtype, shape, order = arguments
        return _Array(_make_array(content, dtype, shape, order == "F"))
    raise Invalid(f"it calls {role}, which makes no data")


def _build(target: Any, state: Any) -> None:
    if isinstance(target, _Dtype):
        order = state[1].decode() if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise Invalid(f"the byte order {order!r} is unknown")
        target.order = order
    elif isinstance(target, _Array):
        _, shape, dtype, fortran, content = state
        target.value = _make_array(content, dtype, shape, bool(fortran))
    else:
        raise Invalid(f"it sets the state of a {type(target).__name__}; only arrays have one")


def _make_array(content: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray:
    kind = _expect(dtype, _Dtype)
    values = np.frombuffer(_expect(content, bytes), np.dtype(kind.order + kind.code))
    return values.reshape(shape, order="F" if fortran else "C")


def _settle(value: Any, settled: dict[int, Any]) -> Any:
    """Put finished arrays in place of the machine's own objects; shared containers are walked once."""
    if isinstance(value, _Array):
        return _expect(value.value, np.ndarray)
    if isinstance(value, (_Name, _Dtype)) or value is MARK:
        raise Invalid("it holds a Python type where data are expected")
    if id(value) in settled:
        return settled[id(value)]
    if isinstance(value, tuple):
        settled[id(value)] = tuple(_settle(item, settled) for item in value)
    elif isinstance(value, (list, dict)):
        settled[id(value)] = value
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = _settle(item, settled)
    return settled.get(id(value), value)
