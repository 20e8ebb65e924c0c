"""Reads pickles with an interpreter of its own, which imports and calls nothing that a file names.

It reads dictionaries, tuples, texts, numbers, numpy arrays, the places of tensors, and of a list the
last tensor; every other value becomes `Unread`, which is empty. Only texts and integers are copied,
compared or hashed, so that repetition and nesting cost no more than their opcodes."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pickletools import genops
from typing import Any, no_type_check

import torch

from mechinterp.checkpoints.io.files import CheckpointError

MAX_BYTES = 12_000_000
"""Largest size of a pickle in bytes; the losses of 500,000 steps take 4.5 million bytes."""
_MAX_STEPS = 300_000
"""Largest number of opcodes, without floats."""
MAX_NAME = 500
"""Largest length of the name of a class or function."""
STORAGES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16},
    **{"BFloat16": torch.bfloat16, "Int": torch.int32, "Long": torch.int64, "Short": torch.int16},
    **{"Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool},
    **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
"""Number types of torch's storages, by the name of the storage before "Storage"."""
# Functions and classes under the names that versions of numpy, jax, haiku and flax use.
NUMPY = "(?:numpy|numpy[.]_?core)[.]"
RECONSTRUCT = re.compile(NUMPY + "multiarray[.]_reconstruct")
SCALAR = re.compile(NUMPY + "multiarray[.]scalar")
FROM_BUFFER = re.compile(NUMPY + "numeric[.]_frombuffer")
JAX_ARRAY = re.compile(
    "jax[.](?:_src|interpreters)[.](?:array|device_array|xla)[.]_?reconstruct_(?:device_)?array"
)
MAPPING = re.compile(
    "haiku[.]_src[.]data_structures[.](?:FlatMapping|FlatMap|to_immutable_dict|to_haiku_dict)"
    "|flax[.]core[.]frozen_dict[.]FrozenDict"
)

MOST_WORDS, MOST_LETTERS = 8, 100
"""Limits on the entries of a tuple that is a key, and on the letters of each."""
_NARROW = "numbers of another type, such as float8; write torch.save({name: t.float() for name, t in torch.load(FILE).items()}, FILE)"


@dataclass(frozen=True)
class Unread:
    """A value that is not kept."""

    name: str = ""
    """Class or function that it would call; "" for a list, a set or the like."""
    state: object = field(default=None, compare=False)
    """Attributes of an object, as stored in the pickle."""


@dataclass(frozen=True)
class Storage:
    """Numbers in an entry of the archive."""

    dtype: torch.dtype
    key: str
    size: int


@dataclass(frozen=True)
class StoredTensor:
    """Place of a tensor, as the file claims it."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class ArrayType:
    """Number type of a numpy array; the pickle states the byte order after the name."""

    code: str
    order: str = "="


@dataclass
class StoredArray:
    """A numpy array or scalar; the pickle states the bytes of its numbers after the name."""

    kind: object = None
    shape: tuple[int, ...] = ()
    by_columns: object = False
    data: object = None
    """Bytes, or the text by which a pickle of protocol 2 stores them."""


@dataclass(eq=False)
class StoredList:
    """A list; its last tensor and its length are kept."""

    last: StoredTensor | None = None
    """The last entry if it is a tensor, else None."""
    count: int = 0

    def add(self, entries: list) -> None:
        """Append entries."""
        self.count += len(entries)
        for entry in entries[-1:]:
            self.last = entry if isinstance(entry, StoredTensor) else None


OTHER = Unread()


class MalformedError(Exception):
    """Error: the bytes are no pickle that is read here; the message says what they are."""


def read_pickle(pickled: bytes) -> object:
    """Content of a pickle: a dictionary with texts or integers as keys, a tuple, text, number,
    `StoredTensor`, `StoredArray`, `StoredList` or `Unread`.

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
            if steps > _MAX_STEPS:
                raise MalformedError(f"a pickle of more than {_MAX_STEPS} steps")
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
        """Put keys and values into the dictionary on top; short tuples become texts, and other keys
        that are not text or integer become None."""
        target = self.stack[-1]
        if isinstance(target, dict):
            keys = (key if isinstance(key, str | int) else key_of(key) for key in items[::2])
            target.update(zip(keys, items[1::2], strict=True))

    @no_type_check
    def append(self, entries: list) -> None:
        """Append to the list on top."""
        if isinstance(self.stack[-1], StoredList):
            self.stack[-1].add(entries)


@no_type_check
def key_of(key: object) -> str | None:
    """Text of a tuple of a few words or numbers, such as adam,0; None for other keys."""
    if not isinstance(key, tuple) or not 0 < len(key) <= MOST_WORDS:
        return None
    if not all(isinstance(word, str | int | float) for word in key):
        return None
    if any(isinstance(word, str) and len(word) > MOST_LETTERS for word in key):
        return None
    return ",".join(map(str, key))


def placeholder(parts: list) -> Unread:
    """Placeholder for a class or function, which is named but never loaded."""
    if not all(isinstance(part, str) and len(part) <= MAX_NAME for part in parts):
        raise MalformedError("a name that is no short text")
    return Unread(".".join(parts))


def storage_of(values: list) -> Storage:
    """Storage that torch's persistent id names.

    Raises:
        MalformedError: If its name, type or size is missing, or its type is not one of torch's
            storages.
    """
    match values[0]:
        case ("storage", Unread("torch.storage.UntypedStorage"), *_):
            raise MalformedError(_NARROW)
        case ("storage", Unread(name), str(key), str(), int(size)) if name:
            kind = name.removeprefix("torch.").removesuffix("Storage")
            if name != f"torch.{kind}Storage" or kind not in STORAGES:
                raise MalformedError(f"one that needs {name}")
            return Storage(STORAGES[kind], key, size)
    raise MalformedError("a storage without a name, a type or a size")


def called(values: list) -> object:
    """Value that a call stands for; the call is not made."""
    match values:
        case [Unread("collections.OrderedDict"), ()]:
            return {}
        case [Unread("_codecs.encode"), (str(text), "latin1")]:
            return text  # bytes in protocol 2; converted only when needed
        case [Unread("numpy.dtype"), (str(code), *_)]:
            return ArrayType(code)
        case [Unread(name), (ArrayType() as kind, data)] if SCALAR.fullmatch(name):
            return StoredArray(kind, (), False, data)
        case [Unread(name), tuple()] if RECONSTRUCT.fullmatch(name):
            return StoredArray()
        case [Unread(name), (data, ArrayType() as kind, tuple(shape), order)] if (
            FROM_BUFFER.fullmatch(name)
        ):
            return set_state((1, shape, kind, order == "F", data), StoredArray())
        case [Unread(name), (_, _, tuple(state), *_)] if JAX_ARRAY.fullmatch(name):
            return set_state(state, StoredArray())
        case [Unread(name), (dict(mapping), *_)] if MAPPING.fullmatch(name):
            return mapping
        case [
            Unread("torch._utils._rebuild_tensor_v2"),
            (Storage() as storage, int(offset), tuple(shape), tuple(strides), *_),
        ] if all(isinstance(size, int) for size in (*shape, *strides)):
            return StoredTensor(storage, offset, shape, strides)
        case [Unread("torch._utils._rebuild_parameter"), (StoredTensor() as tensor, *_)]:
            return tensor
    return Unread(values[0].name) if isinstance(values[0], Unread) else OTHER


def set_state(state: object, target: object) -> object:
    """An array, its type or an unread object with its state in the pickle, without a call."""
    match target, state:
        case ArrayType(), (int(), str(order), *_):
            target.order = order
        case StoredArray(), (int(), tuple(shape), ArrayType() as kind, by_columns, data) if (
            all(type(size) is int for size in shape)  # anything else could be slow to hash
        ):
            target.kind, target.shape = kind, shape
            target.by_columns, target.data = by_columns, data
        case Unread(name), dict() if name:
            object.__setattr__(target, "state", state)  # a reference, not a copy
    return target


Action = Callable[[Machine, Any], object]


def _pushes(made: Callable[[Any], object]) -> Action:
    """Action that pushes a value made from the argument."""
    return lambda machine, argument: machine.stack.append(made(argument))


def _replaces(count: int | None, made: Callable[[list], object]) -> Action:
    """Action that replaces the last `count` values (None: those after the last mark) by a value
    made from them."""
    return lambda machine, _: machine.stack.append(made(machine.pop(count)))


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
    "EMPTY_LIST": _pushes(lambda _: StoredList()),
    "EMPTY_SET": _pushes(lambda _: OTHER),
    "FROZENSET": _replaces(None, lambda _: OTHER),
    "TUPLE": _replaces(None, tuple),
    **{f"TUPLE{count}": _replaces(count, tuple) for count in (1, 2, 3)},
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "POP": lambda machine, _: machine.pop(1),
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop()),
    **dict.fromkeys(("POP_MARK", "ADDITEMS"), lambda machine, _: machine.pop()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop()),
    "BUILD": lambda machine, _: set_state(machine.pop(1)[0], machine.stack[-1]),
    "BINPERSID": _replaces(1, storage_of),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _replaces(2, called)),
    "NEWOBJ_EX": _replaces(3, lambda values: called(values[:2])),
    "GLOBAL": _pushes(lambda name: placeholder(name.split(" "))),
    "STACK_GLOBAL": _replaces(2, placeholder),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET"), lambda machine, place: machine.stack.append(machine.memo[place])
    ),
    **dict.fromkeys(
        ("BINPUT", "LONG_BINPUT"),
        lambda machine, place: machine.memo.update({place: machine.stack[-1]}),
    ),
    "MEMOIZE": lambda machine, _: machine.memo.update({len(machine.memo): machine.stack[-1]}),
}
