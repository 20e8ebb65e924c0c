"""What a pickle holds, read by an interpreter of its own: of a file's names none is imported, none is called.

Dictionaries, texts, numbers, numpy's arrays and the places of tensors are read; all else becomes `Unread`, which
holds nothing.
Nothing is copied, compared or hashed but texts and integers, so that no repetition or nesting costs more than its
opcodes.
"""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import no_type_check

import torch

from mechinterp.checkpoints.io.errors import CheckpointError

MAX_BYTES = 12_000_000
"""Size of a pickle; the losses of 500,000 steps take 4.5 million bytes."""
MAX_STEPS = 300_000
"""Number of opcodes besides floats."""
MAX_NAME = 500
"""Length of the name of a class or function."""
STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}


@dataclass(frozen=True)
class Unread:
    """A value of which nothing is kept."""

    name: str = ""
    """The class or function that it asks for; "" for a list, a set or the like."""


@dataclass(frozen=True)
class Storage:
    """Numbers in an entry of the archive."""

    dtype: torch.dtype
    key: str
    size: int


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, as the file claims."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class ArrayType:
    """The kind of numbers of an array of numpy, whose byte order comes after its name."""

    code: str
    order: str = "="


@dataclass
class StoredArray:
    """An array or scalar of numpy: the bytes of its numbers, which come after its name."""

    kind: object = None
    shape: object = ()
    by_columns: object = False
    data: object = None
    """Bytes, or the text that a pickle of protocol 2 writes for them."""


OTHER = Unread()


@dataclass(frozen=True)
class Encoded:
    """Bytes as the text that a pickle of protocol 2 has for them; made into bytes only if they are asked for."""

    text: str


class Nested(tuple):
    """A tuple that holds tuples."""


class Deep(tuple):
    """A tuple that holds nested ones; one that holds such a one is not kept."""


class MalformedError(Exception):
    """What the bytes are in place of a pickle that is read here."""


def read_pickle(pickled: bytes) -> object:
    """What a pickle holds: a dictionary by texts or integers, a tuple, text, number, `StoredTensor` or `Unread`.

    Raises:
        CheckpointError: If it is too long, or no pickle of protocol 2 to 5.
    """
    machine = Machine()
    try:
        if len(pickled) > MAX_BYTES:
            raise MalformedError(f"a pickle of {len(pickled)} bytes")
        for code, argument in _opcodes(pickled):
            ACTIONS[code](machine, argument)
        return machine.stack.pop()
    except MalformedError as error:
        got = str(error)
    except (IndexError, KeyError, ValueError):
        got = "no pickle"
    raise CheckpointError(f"must hold tensors that can be read without running code, got {got}.")


# Opcodes by the bytes of their argument: so many, or as many as the first so many say.
FLOAT, GLOBAL, STOP = b"Gc."
FLOATS = re.compile(rb"(?:G.{8})+", re.DOTALL)
FIXED = {
    code: width
    for width, codes in {1: b"Khq\x80", 2: b"M", 4: b"Jjr", 8: b"\x95"}.items()
    for code in codes
}
SIZED = {
    code: width
    for width, codes in {1: b"\x8cCU\x8a", 4: b"XBT\x8b", 8: b"\x8d\x8e\x96"}.items()
    for code in codes
}


def _opcodes(pickled: bytes) -> Iterator[tuple[int, bytes]]:
    """The opcodes before STOP with their arguments; floats in a row come as one."""
    at = steps = 0
    while (code := pickled[at]) != STOP:
        start = at + 1
        end = start + FIXED.get(code, 0)
        if code == FLOAT:
            floats = FLOATS.match(pickled, at)
            start, end = (at, floats.end()) if floats else (at, len(pickled) + 1)
        else:
            steps += 1
        if code in SIZED:
            start += SIZED[code]
            end = start + int.from_bytes(pickled[at + 1 : start], "little")
        elif code == GLOBAL:
            end = pickled.index(b"\n", pickled.index(b"\n", at) + 1) + 1
        if end > len(pickled):
            raise MalformedError("no pickle")
        if steps > MAX_STEPS:
            raise MalformedError(f"a pickle of more than {MAX_STEPS} steps")
        if code not in ACTIONS:
            raise MalformedError(f"no pickle of protocol 2 to 5: {pickled[at : at + 1]!r}")
        yield code, pickled[start:end]
        at = end


class Machine:
    """The stack and the memo behind a pickle; what every opcode calls goes without the type checks of the tests."""

    def __init__(self) -> None:
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    @no_type_check
    def pop(self, count: int) -> list:
        """The last so many values."""
        return self.cut(len(self.stack) - count)

    @no_type_check
    def pop_marked(self) -> list:
        """The values behind the last mark."""
        return self.cut(self.marks.pop())

    @no_type_check
    def cut(self, at: int) -> list:
        """The values from a place on."""
        if not 0 <= at <= len(self.stack):
            raise IndexError
        found = self.stack[at:]
        del self.stack[at:]
        return found

    @no_type_check
    def set_items(self, items: list) -> None:
        """Put keys and values into the dictionary on top; a key of another kind than those read is None."""
        target = self.stack[-1]
        if isinstance(target, dict):
            keys = (key if isinstance(key, str | int) else None for key in items[::2])
            target.update(zip(keys, items[1::2], strict=True))


Action = Callable[[Machine, bytes], object]


def _pushes(made: Callable[[bytes], object]) -> Action:
    """Pushes what is made of the argument."""
    return lambda machine, argument: machine.stack.append(made(argument))


@no_type_check
def _replaces(count: int | None, made: Callable[[list], object]) -> Action:
    """Replaces the last so many values, or None: those behind the last mark, by what is made of them."""

    def act(machine: Machine, argument: bytes) -> None:
        taken = machine.pop_marked() if count is None else machine.pop(count)
        machine.stack.append(made(taken))

    return act


@no_type_check
def _get(machine: Machine, argument: bytes) -> None:
    machine.stack.append(machine.memo[int.from_bytes(argument, "little")])


@no_type_check
def _put(machine: Machine, argument: bytes) -> None:
    machine.memo[int.from_bytes(argument, "little")] = machine.stack[-1]


@no_type_check
def _number(argument: bytes) -> int:
    return int.from_bytes(argument, "little")


@no_type_check
def _integer(argument: bytes) -> object:
    """An integer of 64 bits."""
    return int.from_bytes(argument, "little", signed=True) if len(argument) <= 8 else OTHER


@no_type_check
def _tuple(values: list) -> object:
    kinds = set(map(type, values))
    if Deep in kinds:
        return OTHER
    if Nested in kinds:
        return Deep(values)
    return Nested(values) if tuple in kinds else tuple(values)


def _name(parts: list) -> Unread:
    if not all(isinstance(part, str) and len(part) <= MAX_NAME for part in parts):
        raise MalformedError("a name that is no short text")
    return Unread(".".join(parts))


def _storage(values: list) -> Storage:
    match values[0]:
        case ("storage", Unread(name), str(key), str(), int(size)) if name in STORAGES:
            return Storage(STORAGES[name], key, size)
        case ("storage", Unread(name), str(), str(), int()) if name:
            raise MalformedError(f"one that asks for {name}")
    raise MalformedError("a storage without a name, a type or a size")


# Functions and classes under the names that versions of numpy, jax, haiku and flax give them.
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


def _call(values: list) -> object:
    """What a call stands for; none is made."""
    match values:
        case [Unread("collections.OrderedDict"), ()]:
            return {}
        case [Unread("_codecs.encode"), (str(text), "latin1")]:
            return Encoded(text)
        case [Unread("numpy.dtype"), (str(code), *_)]:
            return ArrayType(code)
        case [Unread(name), (ArrayType() as kind, data)] if SCALAR.fullmatch(name):
            return StoredArray(kind, (), False, data)
        case [Unread(name), tuple()] if RECONSTRUCT.fullmatch(name):
            return StoredArray()
        case [Unread(name), (data, ArrayType() as kind, tuple(shape), order)] if (
            FROM_BUFFER.fullmatch(name)
        ):
            return StoredArray(kind, shape, order == "F", data)
        case [Unread(name), (_, _, tuple(state), *_)] if JAX_ARRAY.fullmatch(name):
            array = StoredArray()
            _set_state(array, state)
            return array
        case [Unread(name), (dict(found), *_)] if MAPPING.fullmatch(name):
            return found
        case [
            Unread("torch._utils._rebuild_tensor_v2"),
            (Storage() as storage, int(offset), tuple(shape), tuple(strides), *_),
        ] if all(isinstance(size, int) for size in (*shape, *strides)):
            return StoredTensor(storage, offset, shape, strides)
        case [Unread("torch._utils._rebuild_parameter"), (StoredTensor() as tensor, *_)]:
            return tensor
    return values[0] if isinstance(values[0], Unread) else OTHER


@no_type_check
def _build(machine: Machine, argument: bytes) -> None:
    """What an object is told of its state: of numpy's the kind and the numbers, of all others nothing."""
    (state,) = machine.pop(1)
    _set_state(machine.stack[-1], state)


def _set_state(target: object, state: object) -> None:
    match target, state:
        case ArrayType(), (int(), str(order), *_):
            target.order = order
        case StoredArray(), (int(), tuple(shape), ArrayType() as kind, by_columns, data):
            target.kind, target.shape = kind, shape
            target.by_columns, target.data = by_columns, data


ACTIONS: dict[int, Action] = {
    FLOAT: lambda machine, argument: machine.stack.extend(
        value for (value,) in struct.iter_unpack(">xd", argument)
    ),
    GLOBAL: _pushes(lambda argument: _name(argument.decode().split("\n")[:2])),
    ord("("): lambda machine, _: machine.marks.append(len(machine.stack)),
    ord("0"): lambda machine, _: machine.pop(1),
    ord("1"): lambda machine, _: machine.pop_marked(),
    ord("2"): lambda machine, _: machine.stack.append(machine.stack[-1]),
    ord("N"): _pushes(lambda _: None),
    0x88: _pushes(lambda _: True),
    0x89: _pushes(lambda _: False),
    ord(")"): _pushes(lambda _: ()),
    ord("}"): _pushes(lambda _: {}),
    ord("]"): _pushes(lambda _: OTHER),
    0x8F: _pushes(lambda _: OTHER),  # an empty set
    0x91: _replaces(None, lambda _: OTHER),  # a frozen set
    ord("t"): _replaces(None, _tuple),
    **{0x84 + count: _replaces(count, _tuple) for count in (1, 2, 3)},
    ord("a"): lambda machine, _: machine.pop(1),
    **dict.fromkeys(b"e\x90", lambda machine, _: machine.pop_marked()),
    ord("s"): lambda machine, _: machine.set_items(machine.pop(2)),
    ord("u"): lambda machine, _: machine.set_items(machine.pop_marked()),
    ord("b"): _build,
    ord("Q"): _replaces(1, _storage),
    **dict.fromkeys(b"R\x81", _replaces(2, _call)),
    0x92: _replaces(3, lambda values: _call(values[:2])),
    0x93: _replaces(2, _name),
    ord("h"): _get,
    ord("j"): _get,
    ord("q"): _put,
    ord("r"): _put,
    0x94: lambda machine, _: _put(machine, len(machine.memo).to_bytes(4, "little")),
    **dict.fromkeys(b"\x80\x95", lambda machine, _: None),
    **dict.fromkeys(b"KM", _pushes(_number)),
    **dict.fromkeys(b"J\x8a\x8b", _pushes(_integer)),
    **dict.fromkeys(
        b"X\x8c\x8d", _pushes(lambda argument: argument.decode(errors="surrogatepass"))
    ),
    **dict.fromkeys(b"UT", _pushes(lambda argument: argument.decode("latin1"))),
    **dict.fromkeys(b"BC\x8e\x96", _pushes(bytes)),
}
