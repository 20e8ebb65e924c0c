"""What the calls in a pickle stand for, of which none is made: tensors, arrays of numpy and dictionaries."""

import re
from dataclasses import dataclass, field

import torch

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
    state: object = field(default=None, compare=False)
    """Attributes of an object, as the pickle has them."""


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


def named(parts: list) -> Unread:
    """What stands for a class or function that is only named, never loaded."""
    if not all(isinstance(part, str) and len(part) <= MAX_NAME for part in parts):
        raise MalformedError("a name that is no short text")
    return Unread(".".join(parts))


def storage_of(values: list) -> Storage:
    """The storage that torch's persistent id names.

    Raises:
        MalformedError: If its name, type or size is missing, or the type is none of torch's storages.
    """
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


def called(values: list) -> object:
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
            set_state(array, state)
            return array
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


def set_state(target: object, state: object) -> None:
    """Give an array, its type or an unread object the state that the pickle holds, without a call."""
    match target, state:
        case ArrayType(), (int(), str(order), *_):
            target.order = order
        case StoredArray(), (int(), tuple(shape), ArrayType() as kind, by_columns, data):
            target.kind, target.shape = kind, shape
            target.by_columns, target.data = by_columns, data
        case Unread(name), dict() if name:
            object.__setattr__(target, "state", state)  # a reference: nothing is copied
