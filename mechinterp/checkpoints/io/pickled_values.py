"""Values that the calls in a pickle stand for: tensors, numpy arrays and dictionaries. No call is
ever made."""

import re
from dataclasses import dataclass, field

import torch

MAX_NAME = 500
"""Largest length of the name of a class or function."""
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
    shape: object = ()
    by_columns: object = False
    data: object = None
    """Bytes, or the text by which a pickle of protocol 2 stores them."""


OTHER = Unread()


@dataclass(frozen=True)
class Encoded:
    """Bytes as the text by which a pickle of protocol 2 stores them; converted only when needed."""

    text: str


class Nested(tuple):
    """A tuple that contains tuples."""


class Deep(tuple):
    """A tuple that contains nested tuples; a tuple around it is not kept."""


class MalformedError(Exception):
    """Error: the bytes are no pickle that is read here; the message says what they are."""


def named(parts: list) -> Unread:
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
        case ("storage", Unread(name), str(key), str(), int(size)) if name in STORAGES:
            return Storage(STORAGES[name], key, size)
        case ("storage", Unread(name), str(), str(), int()) if name:
            raise MalformedError(f"one that needs {name}")
    raise MalformedError("a storage without a name, a type or a size")


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


def called(values: list) -> object:
    """Value that a call stands for; the call is not made."""
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
    """Give an array, its type or an unread object the state in the pickle, without a call."""
    match target, state:
        case ArrayType(), (int(), str(order), *_):
            target.order = order
        case StoredArray(), (int(), tuple(shape), ArrayType() as kind, by_columns, data):
            target.kind, target.shape = kind, shape
            target.by_columns, target.data = by_columns, data
        case Unread(name), dict() if name:
            object.__setattr__(target, "state", state)  # a reference, not a copy
