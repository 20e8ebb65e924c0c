"""State dicts and settings in the nested dictionaries of a run, with names joined by dots."""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from mechinterp.checkpoints.foreign.tensors.names import piece_of, shown
from mechinterp.checkpoints.io.arrays import Storages, array_tensors
from mechinterp.checkpoints.io.copies import MOST_SHOWN, chosen_names
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.io.unpickler import StoredArray, StoredList, StoredTensor, Unread

WRAPPERS = (
    *("model", "model_state_dict", "state_dict", "model_state", "net", "network"),
    *("params", "weights", "state", "module"),
)
"""Names under which runs store the weights."""
OPTIMISER = re.compile(
    r"(?:optim|optimi[sz]ers?|opt|(?:lr_)?sched|(?:lr_)?schedulers?)(?:_state)?(?:_dict|s)?",
    re.IGNORECASE,
)
"""Names of dictionaries with the state of an optimiser, whose tensors are no weights."""
SKIPPED = re.compile(
    r"(?:argparse|pathlib|numpy|collections|datetime|omegaconf|ml_collections)[.].*"
    r"|torch[.](?:device|dtype|Size|[a-z]+\d*)|builtins[.](?:set|frozenset|slice|complex|range)|_codecs[.]encode"
)
"""Classes whose values beside the weights are ignored; a file with any other class is refused, and
the class named."""
_MAX_DEPTH, MAX_VISITS = 8, 300_000
HISTORY = "hist_dict"
"""Key of the matrices that the code of Ahn et al. saves during its runs: a list for each run."""
_PRODUCTS = "allparam"
"""Name of these matrices, [layer, head, (P, Q), d, d]."""
SAVED_TIMES = "saved_times"
"""Setting of a file from which the last of several saved state dicts is read: their number."""
StoredPlace = StoredTensor | StoredArray
Read = tuple[dict[str, Tensor], dict[str, object]]
"""Tensors of a file by name, and the settings stored with them."""


def tensors_among(
    root: object, weights: str | None = None, storages: Storages | None = None
) -> Read:
    """Weights by name and the settings stored with them: torch tensors or, without them, numpy
    arrays; other values are ignored.

    Args:
        weights: Name of the state dict, if there are several.
        storages: Numbers of torch tensors; None: a pickle or msgpack, which has arrays only.
    Raises:
        CheckpointError: If there are no weights, several state dicts and none is named, or torch
            tensors without storages.
    """
    if isinstance(root, dict) and (series := _last_of_series(root, weights)):
        last, settings = series
        return tensors_among(last, None, storages)[0], settings
    places = dict(_places(root))
    names = chosen_names({name: place.shape for name, place in places.items()}, weights)
    if weights is None:
        document = _unwrapped(root)
        places = dict(_places(document))
        classes = _needed_classes(document)
        if isinstance(document, dict) and any(not SKIPPED.fullmatch(name) for name in classes):
            raise CheckpointError(_no_weights(root, classes))
    else:
        places = {short: places[name] for name, short in names.items()}
    torches = {name: each for name, each in places.items() if isinstance(each, StoredTensor)}
    if torches and storages is None:
        raise CheckpointError("torch tensors must be written by torch.save, got a plain pickle.")
    if torches and storages is not None:
        read = {name: storages.tensor(name, each) for name, each in torches.items()}
        return read, settings_among(root)
    arrays = {n: each for n, each in places.items() if isinstance(each, StoredArray) and each.shape}
    if not arrays:
        raise CheckpointError(_no_weights(root, _needed_classes(root)))
    return array_tensors(arrays), settings_among(root)


def settings_among(root: object) -> dict[str, object]:
    """Numbers, texts and booleans in a run's dictionaries and objects, by their last name.

    A name with two different values gets None."""
    settings: dict[str, object] = {}
    for (*_, name), value in _entries(root, objects=True):
        if isinstance(name, str) and isinstance(value, bool | int | float | str):
            other = settings.setdefault(name, value)
            settings[name] = value if other == value else None
    return settings


def _last_of_series(root: Mapping, weights: str | None) -> tuple[dict, dict] | None:
    """State dict of the last matrices that a run saved, and settings; None for other files.

    Raises:
        CheckpointError: If the file has several runs and none is named, or no run of this name.
    """
    runs = root.get(HISTORY)
    every = runs.items() if isinstance(runs, dict) else ()
    saved = {str(key): each for key, each in every if isinstance(each, StoredList) and each.last}
    if not saved:
        return None
    listed = ", ".join(map(shown, [*saved][:MOST_SHOWN])) + ", ..." * (len(saved) > MOST_SHOWN)
    first = next(iter(saved))
    if weights is None and len(saved) > 1:
        rule = f"choose one by --weights, such as --weights {shown(first)} (weights=)"
        raise CheckpointError(f"has {len(saved)} runs ({listed}); {rule}.")
    run = saved.get(first if weights is None else weights)
    if run is None:
        rule = f"weights must name a run in the file, one of {listed}"
        raise CheckpointError(f"{rule}, got {weights!r:.80}.")
    return {_PRODUCTS: run.last}, {**settings_among(root), SAVED_TIMES: run.count}


def _needed_classes(root: object) -> list[str]:
    """Classes and functions that values beside the weights need."""
    values = list(root.values()) if isinstance(root, dict) else [root]
    return [value.name for value in values if isinstance(value, Unread) and value.name]


def _unwrapped(document: object, depth: int = 0) -> object:
    """State dict of a run, found under one of a few names, unless parts of the model lie beside it."""
    if not isinstance(document, dict) or depth == _MAX_DEPTH:
        return document
    for name in WRAPPERS:
        inner = document.get(name)
        if isinstance(inner, dict) and any(_places(inner)):
            others = {n: v for n, v in document.items() if n != name and isinstance(v, dict)}
            beside = (piece_of(each) for each, _ in _places(others))
            return document if any(beside) else _unwrapped(inner, depth + 1)
    return document


def _places(root: object) -> Iterator[tuple[str, StoredPlace]]:
    """Tensors in nested dictionaries by dotted names, without those in a dictionary of an optimiser."""
    for path, value in _entries(root):
        named = isinstance(path[-1], str) and None not in path
        beside = len(path) > 1 and OPTIMISER.fullmatch(str(path[0]))
        if isinstance(value, StoredPlace) and named and not beside:
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
        if not isinstance(values, dict) or len(path) > _MAX_DEPTH:
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
        got = f"one tensor of shape {list(root.shape)}; give it a name: torch.save({{'W': torch.load(FILE)}}, FILE)"
    elif isinstance(root, Unread | StoredList):
        got = "a list or the like"
    else:
        got = f"a {type(root).__name__}"
    if isinstance(root, dict) and "optimizer_state_dict" in root:
        got += ", the state of an optimiser; name the file of the model's weights beside it"
    wrappers = ", ".join(WRAPPERS)
    return f"must hold a state dict, names with a tensor each, or one under {wrappers}; got {got}."
