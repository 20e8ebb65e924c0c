"""Tensors from files of torch.save and pickle, without running their code: the weights among other
values.

A run stores its state dict under one of a few names, together with losses, settings and optimiser
state. haiku and flax store nested dictionaries."""

import math
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.copies import chosen_names
from mechinterp.checkpoints.foreign.names import piece_of
from mechinterp.checkpoints.io.archives import archive, array_of, native_tensor
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.unpickler import (
    MAX_BYTES,
    ArrayType,
    Storage,
    StoredArray,
    StoredTensor,
    Unread,
    read_pickle,
)

MAX_AXES, MAX_ARRAY_AXES = 64, 32
OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
READABLE = "must hold tensors that can be read without running code"

WRAPPERS = (
    *("model", "model_state_dict", "state_dict", "model_state", "net", "network"),
    *("params", "weights", "state", "module"),
)
"""Names under which runs store the weights."""
OPTIMISER = re.compile(r"(?:optim|opt_|sched|lr_sched|scaler|rng).*", re.IGNORECASE)
BESIDE = re.compile(rf"{OPTIMISER.pattern}|ema.*", re.IGNORECASE)
"""Names of values beside the weights: optimiser state, random states, averaged weights."""
SKIPPED = re.compile(
    r"(?:argparse|pathlib|numpy|collections|datetime|omegaconf|ml_collections)[.].*"
    r"|torch[.](?:device|dtype|Size|[a-z]+\d*)|builtins[.](?:set|frozenset|slice|complex|range)|_codecs[.]encode"
)
"""Classes whose values beside the weights are ignored; a file with any other class is refused, and
the class named."""
MAX_DEPTH, MAX_VISITS = 8, 300_000
MAX_ARRAY_BYTES = 24_000_000
"""Largest number of bytes of all arrays together; twice the limit of a pickle, as an array may have
two names."""
KIND = re.compile(r"[<>=|]?([fiubc])(1|2|4|8|16)|(float|int|uint|complex)(8|16|32|64|128)|(bool)")

Place = StoredTensor | StoredArray


Read = tuple[dict[str, Tensor], dict[str, object]]
"""Tensors of a file by name, and the settings stored with them."""


def read_torch(file: Path, weights: str | None = None) -> Read:
    """Tensors of a torch.save file by name, and the settings stored with them.

    Args:
        weights: Name of the state dict, if there are several.

    Raises:
        CheckpointError: If it has the format before PyTorch 1.6, contains code, or is another file.
    """
    with file.open("rb") as stream:
        start = stream.read(len(OLD_TORCH))
    if start == OLD_TORCH:
        raise CheckpointError(
            "written by PyTorch before 1.6 or in its old format; save it again with PyTorch >= 1.6: "
            "torch.save(torch.load(FILE), FILE)."
        )
    if start.startswith(b"\x80"):
        return _read_plain_pickle(file, weights)
    if not start.startswith(b"PK"):
        got = "another file" if start else "an empty file"
        raise CheckpointError(f"{READABLE}, as torch.save writes them; got {got}.")
    with archive(file) as opened:
        entries = opened.namelist()
        names = [name for name in entries if name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in entries):
            raise CheckpointError(
                "a TorchScript archive, which holds code; where it runs, write "
                "torch.save(torch.jit.load(FILE).state_dict(), FILE)."
            )
        if len(names) != 1:
            got = f"an archive with {len(names)} pickles"
            raise CheckpointError(f"{READABLE}, as torch.save writes them; got {got}.")
        root = read_pickle(opened.read(names[0]))
        torches, arrays = weights_among(root, weights)
        storages = _Storages(opened, names[0].removesuffix("data.pkl"))
        tensors = {name: storages.tensor(name, each) for name, each in torches.items()}
        return tensors | array_tensors(arrays), settings_among(root)


def _read_plain_pickle(file: Path, weights: str | None) -> Read:
    """numpy arrays in a plain pickle, as runs of haiku and flax are stored."""
    if file.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"a pickle must be at most {MAX_BYTES} bytes.")
    try:
        return arrays_among(read_pickle(file.read_bytes()), weights)
    except CheckpointError as error:
        what = "a plain pickle, from which only numpy arrays are read"
        raise CheckpointError(f"{what}: {error}") from None


def arrays_among(root: object, weights: str | None) -> Read:
    """numpy arrays as tensors from the content of a pickle or msgpack, and the settings stored with
    them."""
    torches, arrays = weights_among(root, weights)
    if torches:
        raise CheckpointError("torch tensors must be written by torch.save, got a plain pickle.")
    return array_tensors(arrays), settings_among(root)


class _Storages:
    """Entries of a torch archive with numbers, each read once."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        self.archive, self.folder = archive, folder
        self.read = cache(self._read)
        self.kinds: dict[str, torch.dtype] = {}
        stated = f"{folder}byteorder" in archive.namelist()
        order = archive.read(f"{folder}byteorder").decode() if stated else sys.byteorder
        self.swapped = order != sys.byteorder

    def tensor(self, name: str, place: StoredTensor) -> Tensor:
        """A tensor whose numbers are all in the file."""
        storage, shape, strides = self.read(place.storage), place.shape, place.strides
        if len(shape) != len(strides) or len(shape) > MAX_AXES:
            rule = f"must have at most {MAX_AXES} axes, a stride each"
            raise CheckpointError(f"{name} {rule}, got {len(shape)} and {len(strides)} strides.")
        if min((place.offset, *shape, *strides)) < 0:
            raise CheckpointError(f"{name} must lie behind the start of its numbers.")
        claimed, held = math.prod(shape) * storage.dtype.itemsize, storage.nbytes
        if claimed > held:
            what = f"{name} of shape {shape}"
            raise CheckpointError(f"{what} must lie in {claimed} bytes, got {held}.")
        end = place.offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape and end > len(storage):
            rule = f"must end within its {len(storage)} numbers"
            raise CheckpointError(f"{name} {rule}, it goes to number {end}.")
        return storage.as_strided(shape, strides, place.offset)

    def _read(self, storage: Storage) -> Tensor:
        """All numbers of an entry."""
        entry = f"data/{storage.key}"
        if self.kinds.setdefault(storage.key, storage.dtype) != storage.dtype:
            raise CheckpointError(f"the entry {entry} must hold numbers of one kind.")
        data = bytearray(self.archive.read(self.folder + entry))
        claimed = storage.size * storage.dtype.itemsize
        if claimed != len(data):
            raise CheckpointError(f"the entry {entry} must have {claimed} bytes, got {len(data)}.")
        if not data:
            return torch.empty(0, dtype=storage.dtype, device="cpu")
        numbers = torch.frombuffer(data, dtype=storage.dtype)
        if self.swapped:
            numbers.untyped_storage().byteswap(storage.dtype)
        return numbers


def weights_among(
    root: object, weights: str | None = None
) -> tuple[dict[str, StoredTensor], dict[str, StoredArray]]:
    """Places of the weights by name: torch tensors or, without them, numpy arrays; other values are
    ignored.

    Args:
        weights: Name of the state dict, if there are several.
    Raises:
        CheckpointError: If there are no weights, or several state dicts and none is named.
    """
    places = dict(_places(root))
    names = chosen_names({name: place.shape for name, place in places.items()}, weights)
    if weights is None:
        document = _unwrapped(root)
        places = dict(_places(document, BESIDE))
        classes = _needed_classes(document)
        if isinstance(document, dict) and any(not SKIPPED.fullmatch(name) for name in classes):
            raise CheckpointError(_no_weights(root, classes))
    else:
        places = {short: places[name] for name, short in names.items()}
    torches = {name: each for name, each in places.items() if isinstance(each, StoredTensor)}
    if torches:
        return torches, {}
    arrays = {n: each for n, each in places.items() if isinstance(each, StoredArray) and each.shape}
    if not arrays:
        raise CheckpointError(_no_weights(root, _needed_classes(root)))
    return {}, arrays


def settings_among(root: object) -> dict[str, object]:
    """Numbers, texts and booleans in a run's dictionaries and objects, by their last name.

    A name with two different values gets None."""
    settings: dict[str, object] = {}
    for (*_, name), value in _entries(root, objects=True):
        if isinstance(name, str) and isinstance(value, bool | int | float | str):
            other = settings.setdefault(name, value)
            settings[name] = value if other == value else None
    return settings


def _needed_classes(root: object) -> list[str]:
    """Classes and functions that values beside the weights need."""
    values = list(root.values()) if isinstance(root, dict) else [root]
    return [value.name for value in values if isinstance(value, Unread) and value.name]


def _unwrapped(document: object, depth: int = 0) -> object:
    """State dict of a run, found under one of a few names, unless parts of the model lie beside it."""
    if not isinstance(document, dict) or depth == MAX_DEPTH:
        return document
    for name in WRAPPERS:
        inner = document.get(name)
        if isinstance(inner, dict) and any(_places(inner)):
            others = {n: v for n, v in document.items() if n != name and isinstance(v, dict)}
            beside = (piece_of(each) for each, _ in _places(others, BESIDE))
            return document if any(beside) else _unwrapped(inner, depth + 1)
    return document


def _places(root: object, skipped: re.Pattern[str] = OPTIMISER) -> Iterator[tuple[str, Place]]:
    """Tensors in nested dictionaries by dotted names, without those of the optimiser."""
    for path, value in _entries(root):
        named = isinstance(path[-1], str) and None not in path
        if isinstance(value, Place) and named and not skipped.fullmatch(str(path[0])):
            yield ".".join(map(str, path)), value


def _entries(root: object, *, objects: bool = False) -> Iterator[tuple[tuple, object]]:
    """Values in nested dictionaries, each with its path, the keys from the outermost on.

    Args:
        objects: True: the attributes of objects count, too.
    """
    waiting: list[tuple[tuple, object]] = [((), root)]
    visits = 0
    while waiting:
        path, values = waiting.pop()
        values = values.state if objects and isinstance(values, Unread) else values
        if not isinstance(values, dict) or len(path) > MAX_DEPTH:
            continue
        visits += len(values)
        if visits > MAX_VISITS:
            raise CheckpointError(f"must hold at most {MAX_VISITS} values.")
        inner = [((*path, key), value) for key, value in values.items()]
        yield from inner
        waiting += (each for each in reversed(inner) if isinstance(each[1], dict | Unread))


def _no_weights(root: object, classes: list[str]) -> str:
    """Message on a file without weights: its content, and what to do."""
    for name in ([name for name in classes if not SKIPPED.fullmatch(name)] or classes)[:1]:
        got = f"it needs {name}, and no code of a file is run: where that class is installed, write torch.save(model.state_dict(), FILE)"
        return f"must hold a state dict, names with a tensor each; {got}."
    if isinstance(root, dict):
        keys = [str(key)[:40] for key in root][:8]
        got = f"a dictionary of {', '.join(keys)}" if keys else "an empty dictionary"
    elif isinstance(root, StoredTensor | StoredArray):
        got = f"one tensor of shape {list(root.shape)}"
    elif isinstance(root, Unread):
        got = "a list or the like"
    else:
        got = f"a {type(root).__name__}"
    wrappers = ", ".join(WRAPPERS)
    return f"must hold a state dict, names with a tensor each, or one under {wrappers}; got {got}."


def array_tensors(places: Mapping[str, StoredArray]) -> dict[str, Tensor]:
    """numpy arrays as tensors, after their claimed sizes are checked against their bytes.

    Raises:
        CheckpointError: If an array claims more or fewer bytes than it has, or has no plain
            numbers.
    """
    tensors, left = {}, MAX_ARRAY_BYTES
    for name, place in places.items():
        kind, shape = _kind(place, name), place.shape
        if min(shape, default=0) < 0:
            raise CheckpointError(f"{name} must have a shape of numbers >= 0.")
        if len(shape) > MAX_ARRAY_AXES:
            rule = f"must have at most {MAX_ARRAY_AXES} axes"
            raise CheckpointError(f"{name} {rule}, got {len(shape)}.")
        # Protocol 2 stores bytes as texts, and empty bytes as a call.
        data = place.data.encode("latin1") if isinstance(place.data, str) else place.data
        data = data if isinstance(data, bytes) else b""
        array = array_of(data, kind, shape, place.by_columns is True, name)
        left -= len(data)
        if left < 0:
            raise CheckpointError(f"arrays must lie in {MAX_ARRAY_BYTES} bytes together.")
        tensors[name] = native_tensor(array, name)
    return tensors


def _kind(place: StoredArray, name: str) -> np.dtype:
    kind = place.kind
    if isinstance(kind, ArrayType) and KIND.fullmatch(kind.code):
        return np.dtype(kind.code).newbyteorder(">" if kind.order == ">" else "|")
    got = kind.code if isinstance(kind, ArrayType) else "no dtype"
    raise CheckpointError(f"{name} must hold plain numbers, got {got}.")
