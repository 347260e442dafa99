"""Data out of a pickle without running it: opcodes are taken apart, and every class in it stays a name.

The index of a torch_dist checkpoint is a pickle of a few dataclasses. `torch.load(weights_only=True)` cannot read it
(another protocol), and an unpickler would call what the file names. This reader knows the opcodes of data, builds
tuples, lists and dictionaries, and makes a `Record` of everything that a class or function would have made.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_LARGEST = 1 << 31
_LARGEST_KEY = 1000


class PickleError(Exception):
    """A pickle that holds more than data, or is damaged."""


@dataclass(eq=False)
class Record:
    """What a class of this name was to be made of: its arguments, and the state that was to be set."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, otherwise: Any = None) -> Any:
        """A field of the state."""
        return self.state.get(key, otherwise)


def read_pickle(data: bytes) -> Any:
    """The data of a pickle; raises `PickleError` at any opcode that is not one of plain data."""
    machine = _Machine()
    if len(data) > _LARGEST:
        raise PickleError(f"{len(data)} bytes; accepted: at most {_LARGEST}")
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except PickleError:
        raise
    except Exception as error:  # a damaged file can fail anywhere
        raise PickleError(f"{type(error).__name__}: {error}") from error
    raise PickleError("ends before its end")


class _Machine:
    """The stack of a pickle, for opcodes of data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._steps: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(_NOTHING, lambda _: None),
            **dict.fromkeys(_LITERALS, self.stack.append),
            **{name: self._pusher(value) for name, value in _CONSTANTS.items()},
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_TUPLE": lambda _: self.stack.append(()),
            "EMPTY_SET": lambda _: self.stack.append([]),
            "MARK": lambda _: self._marks.append(len(self.stack)),
            "TUPLE": lambda _: self.stack.append(tuple(self._from_mark())),
            "LIST": lambda _: self.stack.append(self._from_mark()),
            "TUPLE1": lambda _: self.stack.append(tuple(self._last(1))),
            "TUPLE2": lambda _: self.stack.append(tuple(self._last(2))),
            "TUPLE3": lambda _: self.stack.append(tuple(self._last(3))),
            "APPEND": lambda _: self._extend(self._last(1)),
            "APPENDS": lambda _: self._extend(self._from_mark()),
            "ADDITEMS": lambda _: self._extend(self._from_mark()),
            "SETITEM": lambda _: self._set(self._last(2)),
            "SETITEMS": lambda _: self._set(self._from_mark()),
            "MEMOIZE": lambda _: self._memo.__setitem__(len(self._memo), self.stack[-1]),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda n: self._memo.__setitem__(n, self.stack[-1])),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda n: self.stack.append(self._memo[n])),
            "GLOBAL": lambda text: self.stack.append(Record(text.replace(" ", "."))),
            "STACK_GLOBAL": lambda _: self.stack.append(Record(".".join(map(_text, self._last(2))))),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda _: self._made()),
            "BUILD": lambda _: self._built(),
        }

    def step(self, name: str, argument: Any) -> None:
        """One opcode."""
        known = self._steps.get(name)
        if known is None:
            raise PickleError(f"opcode {name}, which is not one of plain data")
        known(argument)

    def _pusher(self, value: Any) -> Callable[[Any], None]:
        return lambda _: self.stack.append(value)

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise PickleError("a stack that is too short")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _from_mark(self) -> list[Any]:
        first = self._marks.pop()
        taken = self.stack[first:]
        del self.stack[first:]
        return taken

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise PickleError("items for something that is no list")
        self.stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        table = target if isinstance(target, dict) else target.state if isinstance(target, Record) else None
        if table is None:
            raise PickleError("entries for something that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            table[_hashable(key, [_LARGEST_KEY])] = value

    def _made(self) -> None:
        maker, arguments = self._last(2)
        if not isinstance(maker, Record) or not isinstance(arguments, tuple):
            raise PickleError("a call of something that is no class")
        self.stack.append(Record(maker.name, arguments))

    def _built(self) -> None:
        (state,) = self._last(1)
        target = self.stack[-1]
        if not isinstance(target, Record):
            raise PickleError("a state for something that is no object")
        if isinstance(state, dict):
            target.state.update(state)
        else:
            target.state["state"] = state


def _hashable(key: Any, left: list[int]) -> Any:
    """Keys of a dictionary: a record counts as itself. `left`: a few bytes of a pickle can stand for 2**40 parts."""
    left[0] -= 1
    if left[0] < 0:
        raise PickleError(f"a key of more than {_LARGEST_KEY} parts")
    return tuple(_hashable(item, left) for item in key) if isinstance(key, list | tuple) else key


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise PickleError(f"{type(value).__name__} where a name was expected")
    return value


_NOTHING = ("PROTO", "FRAME")
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)
