"""Reads pickles with an interpreter of its own, which imports and calls nothing that a file names.

It reads dictionaries, texts, numbers, numpy arrays and the places of tensors; every other value
becomes `Unread`, which is empty. Only texts and integers are copied, compared or hashed, so that
repetition and nesting cost no more than their opcodes."""

from collections.abc import Callable
from pickletools import genops
from typing import Any, no_type_check

from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.pickled_values import (
    OTHER,
    Deep,
    MalformedError,
    Nested,
    called,
    named,
    set_state,
    storage_of,
)

MAX_BYTES = 12_000_000
"""Largest size of a pickle in bytes; the losses of 500,000 steps take 4.5 million bytes."""
MAX_STEPS = 300_000
"""Largest number of opcodes, without floats."""


def read_pickle(pickled: bytes) -> object:
    """Content of a pickle: a dictionary with texts or integers as keys, a tuple, text, number,
    `StoredTensor` or `Unread`.

    Raises:
        CheckpointError: If it is too long, or not a pickle of protocol 2 to 5.
    """
    machine, steps, got = Machine(), 0, "no pickle"
    try:
        if len(pickled) > MAX_BYTES:
            raise MalformedError(f"a pickle of {len(pickled)} bytes")
        for opcode, argument, _ in genops(pickled):
            if opcode.name == "STOP":
                return machine.stack.pop()
            steps += opcode.name != "BINFLOAT"
            if steps > MAX_STEPS:
                raise MalformedError(f"a pickle of more than {MAX_STEPS} steps")
            if opcode.name not in ACTIONS:
                code = opcode.code.encode("latin1")
                raise MalformedError(f"no pickle of protocol 2 to 5: {code!r}")
            ACTIONS[opcode.name](machine, argument)
    except MalformedError as error:
        got = str(error)
    except (IndexError, KeyError, ValueError):
        pass
    raise CheckpointError(f"must hold tensors that can be read without running code, got {got}.")


class Machine:
    """Stack and memo of the interpreter; functions called for every opcode skip the type checks of
    the tests."""

    def __init__(self) -> None:
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    @no_type_check
    def pop(self, count: int | None = None) -> list:
        """The last `count` values; None: those after the last mark."""
        at = self.marks.pop() if count is None else len(self.stack) - count
        if not 0 <= at <= len(self.stack):
            raise IndexError
        popped = self.stack[at:]
        del self.stack[at:]
        return popped

    @no_type_check
    def set_items(self, items: list) -> None:
        """Put keys and values into the dictionary on top; keys that are not text or integer become
        None."""
        target = self.stack[-1]
        if isinstance(target, dict):
            keys = (key if isinstance(key, str | int) else None for key in items[::2])
            target.update(zip(keys, items[1::2], strict=True))


Action = Callable[[Machine, Any], object]


def _pushes(made: Callable[[Any], object]) -> Action:
    """Action that pushes a value made from the argument."""
    return lambda machine, argument: machine.stack.append(made(argument))


@no_type_check
def _replaces(count: int | None, made: Callable[[list], object]) -> Action:
    """Action that replaces the last `count` values (None: those after the last mark) by a value
    made from them."""

    return lambda machine, _: machine.stack.append(made(machine.pop(count)))


@no_type_check
def _get(machine: Machine, place: int) -> None:
    machine.stack.append(machine.memo[place])


@no_type_check
def _put(machine: Machine, place: int) -> None:
    machine.memo[place] = machine.stack[-1]


@no_type_check
def _tuple(values: list) -> object:
    kinds = set(map(type, values))
    if Deep in kinds:
        return OTHER
    if Nested in kinds:
        return Deep(values)
    return Nested(values) if tuple in kinds else tuple(values)


@no_type_check
def _build(machine: Machine, argument: object) -> None:
    """Set the state of an object: kind and numbers of numpy arrays, nothing for others."""
    (state,) = machine.pop(1)
    set_state(machine.stack[-1], state)


ACTIONS: dict[str, Action] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(
        (
            *("BINFLOAT", "BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINUNICODE"),
            *("BINUNICODE8", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
            *("BINBYTES8", "NONE"),
        ),
        lambda machine, argument: machine.stack.append(argument),
    ),
    "BYTEARRAY8": _pushes(bytes),
    # At most 64 bits: longer integers are slow to hash.
    **dict.fromkeys(("LONG1", "LONG4"), _pushes(lambda n: n if -(2**63) <= n < 2**63 else OTHER)),
    "NEWTRUE": _pushes(lambda _: True),
    "NEWFALSE": _pushes(lambda _: False),
    "EMPTY_TUPLE": _pushes(lambda _: ()),
    "EMPTY_DICT": _pushes(lambda _: {}),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), _pushes(lambda _: OTHER)),
    "FROZENSET": _replaces(None, lambda _: OTHER),
    "TUPLE": _replaces(None, _tuple),
    **{f"TUPLE{count}": _replaces(count, _tuple) for count in (1, 2, 3)},
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.pop(1),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "APPEND": lambda machine, _: machine.pop(1),
    **dict.fromkeys(("POP_MARK", "APPENDS", "ADDITEMS"), lambda machine, _: machine.pop()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop()),
    "BUILD": _build,
    "BINPERSID": _replaces(1, storage_of),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _replaces(2, called)),
    "NEWOBJ_EX": _replaces(3, lambda values: called(values[:2])),
    "GLOBAL": _pushes(lambda name: named(name.split(" "))),
    "STACK_GLOBAL": _replaces(2, named),
    "BINGET": _get,
    "LONG_BINGET": _get,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
}
