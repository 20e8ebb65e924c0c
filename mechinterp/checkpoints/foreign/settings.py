"""Settings that a file of weights, and a config beside it, state; `names.toml` has their spellings."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mechinterp.checkpoints.foreign.options import JOINS
from mechinterp.checkpoints.foreign.tensors.names import TABLE, Tensors
from mechinterp.checkpoints.io.files import naming, read_json, read_yaml
from mechinterp.checkpoints.io.trees import SAVED_TIMES
from mechinterp.checkpoints.native.folder import OWN
from mechinterp.config.model import SCORES

TASK_KEY = "mechinterp_task"
"""Key of the task's fields, in the config.json that a `Monitor` writes."""
COUNTS, _TEXTS, FLAGS, NUMBERS = (
    {name: spellings.split() for name, spellings in TABLE[kind].items()}
    for kind in ("counts", "words", "flags", "numbers")
)
"""Spellings of settings by the kind of their values, from names.toml."""
POSITIONS = {word: name for name, words in TABLE["positions"].items() for word in words.split()}
"""Names of positions, by their spellings."""
ALIASES = {"swish": "silu", "gelu_tanh": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
"""Other names of activations."""
ONLY = {
    **{"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    **{"add_cross_attention": False},
}
"""Required values of settings of GPT-2, as other values make another model."""
EMPTY = ("null", "Null", "NULL", "~", "")
"""Texts that mean no value in YAML, whose values are all read as texts."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Tensors of a file whose format is not known yet, with the settings beside it."""

    file: Path
    tensors: Tensors
    settings: Mapping[str, object]
    """Settings of config.json or config.yaml beside the file; empty if there is none."""
    step: int = 0
    """Number of updates of the weights, if the file's name shows it, else 0."""


def settings_of(path: Path, inside: Mapping[str, object]) -> dict[str, object]:
    """Settings that a file of weights, and config.json or config.yaml beside it, state.

    Args:
        inside: Settings in the file, under any name.
    Raises:
        CheckpointError: If a value is not possible, or two of these places differ.
    """
    stated: dict[str, tuple[object, str]] = {}
    for file, raw in ((path, inside), *_beside(path)):
        with naming(file):
            for name, value in settled(raw).items():
                known, place = stated.setdefault(name, (value, file.name))
                if known != value:
                    raise ValueError(f"{name} must be {known}, as in {place}, got {value}.")
    return {name: value for name, (value, _) in stated.items()}


def _lora_scale(raw: Mapping[str, object]) -> dict[str, object]:
    """Factor on the product of LoRA's matrices, if its config states it."""
    alpha, rank = raw.get("lora_alpha"), raw.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        return {}
    return {"lora_scale": float(alpha) / (rank**0.5 if raw.get("use_rslora") is True else rank)}


def settled(raw: Mapping[str, object]) -> dict[str, object]:
    """Settings under the names of this package; unknown settings are left out.

    If a file states several numbers of heads, they are listed in `several_heads`, a text.

    Raises:
        ValueError: If a value is not possible, or makes another model.
    Example:
        >>> settled({"n_head": 4, "use_rope": True, "lr": 0.1})
        {'n_heads': 4, 'positions': 'rotary'}
    """
    for key, value in ONLY.items():
        if str(raw.get(key, value)).lower() != str(value).lower():
            raise ValueError(f"{key} must be {value}, got {raw[key]!r}.")
    known: dict[str, object] = {TASK_KEY: raw.get(TASK_KEY), **_lora_scale(raw)}
    known[SAVED_TIMES] = raw.get(SAVED_TIMES)
    raw = {_in_snake_case(key): value for key, value in raw.items()} | dict(raw)
    for name, spellings in (COUNTS | _TEXTS | FLAGS | NUMBERS).items():
        values = [(key, raw[key]) for key in spellings if raw.get(key) is not None]
        read = {key: _value(name, key, value) for key, value in values}
        different = {value for value in read.values() if value is not None}
        if len(different) == 1:
            known[name] = different.pop()
        elif different and name == "n_heads":
            listed = ", ".join(f"{key} = {value}" for key, value in read.items())
            known["several_heads"] = listed
    if known.pop("rotary", None):
        known["positions"] = "rotary"
    if isinstance(first := known.pop("norm_first", None), bool):
        known["norm"] = "before" if first else "after"
    return {name: value for name, value in known.items() if value is not None}


def _in_snake_case(key: str) -> str:
    """A key such as numHeads as num_heads."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()


def _value(name: str, key: str, value: object) -> object:
    """Value of a setting, also from text; None if it has no meaning here."""
    text = str(value).strip().lower()[:80]
    if name in COUNTS:
        least = 2 if name == "n_points" else 1
        whole = not isinstance(value, bool) and text.isdecimal() and len(text) < 10
        if whole and int(text) >= least:
            return int(text)
        if whole or name in ("n_heads", "n_points"):
            raise ValueError(f"{key} must be an integer >= {least}, got {value!r:.42}.")
        return None
    if name in FLAGS:
        if name == "attend_to_self" and text not in ("true", "false"):
            raise ValueError(f"{key} must be true or false, got {value!r:.42}.")
        return {"true": True, "false": False}.get(text)
    if name in NUMBERS:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise ValueError(f"{key} must be a number >= 0, got {value!r:.42}.")
        return number
    if not isinstance(value, str):
        return None
    if name == "positions":
        if text not in POSITIONS:
            known = ", ".join(TABLE["positions"])
            raise ValueError(f"{key} must be one of {known}, got {value!r:.42}.")
        return None if POSITIONS[text] == "learned" else POSITIONS[text]
    if name == "activation":
        return ALIASES.get(text, text)
    # "linear" does not decide if scores are divided by the number of keys.
    possible = {"score": set(SCORES) - {"linear"}, **JOINS}[name]
    return text if text in possible else None


def _beside(path: Path) -> list[tuple[Path, Mapping[str, object]]]:
    """Settings in config.json and in config.yaml beside a file: at the top, and under `model`.

    The training's numbers of points and noise are those of the code of Garg et al.
    """
    json_file, yaml_file = path.with_name("config.json"), path.with_name("config.yaml")
    stated: list[tuple[Path, Mapping[str, object]]] = []
    for file, read in ((json_file, read_json), (yaml_file, read_yaml)):
        document = read(file) if file.is_file() else None
        if not isinstance(document, dict) or (file == json_file and OWN & set(document)):
            continue
        points = _within(document, "training", "curriculum", "points", "end")
        noise = _within(document, "training", "task_kwargs", "noise_std")
        model = _within(document, "model")
        trained = {"n_points": points, "noise_std": noise} if read is read_yaml else {}
        for part in (document, model if isinstance(model, dict) else {}, trained):
            stated.append((file, {n: None if v in EMPTY else v for n, v in part.items()}))
    adapter = path.with_name("adapter_config.json")
    document = read_json(adapter) if adapter.is_file() else None
    if isinstance(document, dict) and _lora_scale(document):
        names = ("r", "lora_alpha", "use_rslora")
        stated.append((adapter, {name: document.get(name) for name in names}))
    return stated


def _within(document: object, *names: str) -> object:
    """Entry of nested mappings; None if missing."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document
