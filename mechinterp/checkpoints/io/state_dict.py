"""The weights among what else a pickled run or a dictionary of numpy's arrays holds.

A run keeps its state dict under one of a few names, beside losses, settings and the optimiser's state; haiku and flax
keep dictionaries of dictionaries.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from mechinterp.checkpoints.io.archives import array_of, native_tensor
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.pickled_values import (
    ArrayType,
    Encoded,
    StoredArray,
    StoredTensor,
    Unread,
)

WRAPPERS = (
    *("model", "model_state_dict", "state_dict", "model_state", "net", "network"),
    *("params", "weights", "state", "module"),
)
"""Under which names runs keep the weights."""
BESIDE = re.compile(r"(?:optim|opt_|sched|lr_sched|scaler|rng|ema).*", re.IGNORECASE)
SKIPPED = re.compile(
    r"(?:argparse|pathlib|numpy|collections|datetime|omegaconf|ml_collections)[.].*"
    r"|torch[.](?:device|dtype|Size|[a-z]+\d*)|builtins[.](?:set|frozenset|slice|complex|range)|_codecs[.]encode"
)
"""Classes whose values beside the weights are passed over; any other is named, and the file refused."""
MAX_DEPTH, MAX_VISITS, MAX_AXES = 8, 300_000, 32
MAX_ARRAY_BYTES = 24_000_000
"""Bytes of all arrays together, twice what a pickle may have: one may stand under two names."""
KIND = re.compile(r"[<>=|]?([fiubc])(1|2|4|8|16)|(float|int|uint|complex)(8|16|32|64|128)|(bool)")

Place = StoredTensor | StoredArray


def weights_among(root: object) -> tuple[dict[str, StoredTensor], dict[str, StoredArray]]:
    """Places of the weights by name: torch's tensors or, where there are none, numpy's arrays; all else is passed over.

    Raises:
        CheckpointError: If there are none.
    """
    document = root
    for _ in range(MAX_DEPTH):
        inner = _wrapped(document)
        if inner is None:
            break
        document = inner
    places = dict(_places(document))
    asked = _asked(document)
    if isinstance(document, dict) and any(not SKIPPED.fullmatch(name) for name in asked):
        raise CheckpointError(_no_weights(asked))
    torches = {name: each for name, each in places.items() if isinstance(each, StoredTensor)}
    if torches:
        return torches, {}
    arrays = {n: each for n, each in places.items() if isinstance(each, StoredArray) and each.shape}
    if not arrays:
        raise CheckpointError(_no_weights(_asked(root)))
    return {}, arrays


def _asked(root: object) -> list[str]:
    """Classes and functions that values beside the weights ask for."""
    values = list(root.values()) if isinstance(root, dict) else [root]
    return [value.name for value in values if isinstance(value, Unread) and value.name]


def _wrapped(document: object) -> dict | None:
    if not isinstance(document, dict):
        return None
    for name in WRAPPERS:
        inner = document.get(name)
        if isinstance(inner, dict) and inner is not document and any(_places(inner)):
            return inner
    return None


def _places(root: object) -> Iterator[tuple[str, Place]]:
    """The tensors in dictionaries of dictionaries by their dotted names, without those of the optimiser."""
    waiting: list[tuple[str, object, int]] = [("", root, 0)]
    visits = 0
    while waiting:
        prefix, values, depth = waiting.pop()
        if not isinstance(values, dict) or depth > MAX_DEPTH:
            continue
        inner = []
        for name, value in values.items():
            visits += 1
            if visits > MAX_VISITS:
                raise CheckpointError(f"must hold at most {MAX_VISITS} values.")
            if not isinstance(name, str) or (depth == 0 and BESIDE.fullmatch(name)):
                continue
            if isinstance(value, Place):
                yield prefix + name, value
            elif isinstance(value, dict):
                inner.append((f"{prefix}{name}.", value, depth + 1))
        waiting += reversed(inner)


def _no_weights(asked: list[str]) -> str:
    got = ""
    for name in ([name for name in asked if not SKIPPED.fullmatch(name)] or asked)[:1]:
        got = f"; it asks for {name}, and no code of a file is run: where that class is, write torch.save(model.state_dict(), FILE)"
    wrappers = ", ".join(WRAPPERS)
    return f"must hold a state dict, names with a tensor each, or one under {wrappers}{got}."


def array_tensors(places: Mapping[str, StoredArray]) -> dict[str, Tensor]:
    """Arrays of numpy as tensors, what they claim held against the bytes that are there.

    Raises:
        CheckpointError: If one claims other bytes than it has, or holds no plain numbers.
    """
    tensors, left = {}, MAX_ARRAY_BYTES
    for name, place in places.items():
        kind, shape = _kind(place, name), place.shape
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise CheckpointError(f"{name} must have a shape of numbers >= 0.")
        if len(shape) > MAX_AXES:
            raise CheckpointError(f"{name} must have at most {MAX_AXES} axes, got {len(shape)}.")
        data = place.data.text if isinstance(place.data, Encoded) else place.data
        # Protocol 2 has texts for bytes, and calls bytes for those that are empty.
        data = data.encode("latin1") if isinstance(data, str) else data
        data = data if isinstance(data, bytes) else b""
        array = array_of(data, kind, shape, place.by_columns is True, name)
        left -= len(data)
        if left < 0:
            raise CheckpointError(f"arrays must lie in {MAX_ARRAY_BYTES} bytes together.")
        tensors[name] = native_tensor(array)
    return tensors


def _kind(place: StoredArray, name: str) -> np.dtype:
    kind = place.kind
    if isinstance(kind, ArrayType) and KIND.fullmatch(kind.code):
        return np.dtype(kind.code).newbyteorder(">" if kind.order == ">" else "|")
    got = kind.code if isinstance(kind, ArrayType) else "no dtype"
    raise CheckpointError(f"{name} must hold plain numbers, got {got}.")
