"""Sweep files: JSON files that list models to train."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from mechinterp.checkpoints.io.files import read_json
from mechinterp.config import ExperimentConfig, from_dict, override, value_of
from mechinterp.presets import preset

ENTRY_FIELDS = ("preset", "config", "set", "grid", "name")
MOST_MODELS = 10_000
"""Largest number of models in a sweep file; larger grids are refused before any config is built."""


def load_sweep(file: str | Path) -> dict[str, ExperimentConfig]:
    """Configs in a sweep file by model name, in the order of the file.

    The file is JSON: one entry or a list of entries. An entry starts from a "preset" or a "config", changes the fields in
    "set", and takes every combination of the values in "grid". The pattern "name" names its models; {model.n_heads} in it
    stands for that field's value.

    Raises:
        ValueError: If the file is not a sweep file; the message names the file and the rule.
    Example:
        >>> len(load_sweep("analyses/sweeps/softmax.json"))
        26
    """
    file = Path(file)
    document = read_json(file)
    entries = document if isinstance(document, list) else [document]
    models: dict[str, ExperimentConfig] = {}
    try:
        if (n_models := sum(map(_n_models, entries))) > MOST_MODELS:
            raise ValueError(
                f"a sweep file must list at most {MOST_MODELS} models, got {n_models}; split it into several files."
            )
        for entry in entries:
            for name, config in _entry_models(entry):
                if name in models:
                    raise ValueError(f"names must differ, got {name!r} twice.")
                models[name] = config
    except ValueError as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None
    if not models:
        raise ValueError(f"{file}: a sweep file must hold at least one entry, got none.")
    return models


def _n_models(entry: object) -> int:
    """Number of models of an entry: the product of the lengths of its grid."""
    grid = entry.get("grid") if isinstance(entry, dict) else None
    values = grid.values() if isinstance(grid, dict) else ()
    return math.prod(len(each) for each in values if isinstance(each, list))


def _entry_models(entry: object) -> Iterator[tuple[str, ExperimentConfig]]:
    if not isinstance(entry, dict) or not set(entry) <= set(ENTRY_FIELDS):
        raise ValueError(
            f"an entry must be an object with fields among {', '.join(ENTRY_FIELDS)}, got {entry!r}."
        )
    if ("preset" in entry) == ("config" in entry):
        given = "both" if "preset" in entry else "neither"
        raise ValueError(f"an entry must have either a preset or a config, got {given}: {entry!r}.")
    for part in ("preset", "name"):
        if not isinstance(entry.get(part, ""), str):
            raise ValueError(f"{part} must be text, got {entry[part]!r}.")
    base = preset(entry["preset"]) if "preset" in entry else from_dict(entry["config"])
    base = override(base, *_assignments(entry.get("set", {}), "set"))
    grid = entry.get("grid", {})
    if not isinstance(grid, dict) or not all(isinstance(values, list) for values in grid.values()):
        raise ValueError(f"grid must give a list of values for each field, got {grid!r}.")
    default_name = "-".join([entry.get("preset", "model"), *(f"{key}{{{key}}}" for key in grid)])
    for values in itertools.product(*grid.values()):
        config = override(base, *_assignments(dict(zip(grid, values, strict=True)), "grid"))
        yield _name(entry.get("name", default_name), config), config


def _assignments(values: object, field: str) -> list[str]:
    if not isinstance(values, dict):
        raise ValueError(f"{field} must be an object of field names and values, got {values!r}.")
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def _name(pattern: str, config: ExperimentConfig) -> str:
    name = re.sub(r"\{([\w.]+)\}", lambda match: str(value_of(config, match[1])), pattern)
    if not re.fullmatch(r"\w[\w.=+-]*", name):
        raise ValueError(f"a name must consist of letters, digits and . _ - = +, got {name!r}.")
    return name
