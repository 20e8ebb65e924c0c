"""Settings that a file of weights, or a config beside it, states: number of heads, sizes, positions
and so on.

`names.toml` has the names that codes use for them."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from mechinterp.checkpoints.foreign.names import TABLE
from mechinterp.checkpoints.foreign.options import JOINS
from mechinterp.checkpoints.io.atomic import read_json, read_yaml
from mechinterp.checkpoints.io.errors import naming
from mechinterp.checkpoints.native.folder import OWN
from mechinterp.config.model import SCORES

TASK_KEY = "mechinterp_task"
"""Key of the task's fields, in the config.json that a `Monitor` writes."""
COUNTS, WORDS, FLAGS, NUMBERS = (
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


def settings_of(path: Path, inside: Mapping[str, object]) -> dict[str, object]:
    """Settings that a file of weights, and config.json or config.yaml beside it, state.

    Args:
        inside: Settings in the file, under any name.
    Raises:
        CheckpointError: If a value is not possible, or the file and its config differ.
    """
    stated: dict[str, object] = {}
    for file, raw in ((path, inside), *_beside(path)):
        with naming(file):
            for name, value in settled(raw).items():
                if stated.get(name, value) != value:
                    raise ValueError(f"{name} must be {stated[name]}, as in the file of weights, got {value}.")  # fmt: skip
                stated[name] = value
    return stated


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
        if raw.get(key, value) != value:
            raise ValueError(f"{key} must be {value}, got {raw[key]!r}.")
    known = {TASK_KEY: raw.get(TASK_KEY)}
    raw = {_in_snake_case(key): value for key, value in raw.items()} | dict(raw)
    for name, spellings in (COUNTS | WORDS | FLAGS | NUMBERS).items():
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
    """Settings in Hugging Face's config.json, and in config.yaml of the code of Garg et al."""
    file, garg = path.with_name("config.json"), path.with_name("config.yaml")
    stated: list[tuple[Path, Mapping[str, object]]] = []
    document = read_json(file) if file.is_file() else None
    if isinstance(document, dict) and not OWN & set(document):
        stated.append((file, document))
    if garg.exists():
        document = read_yaml(garg)
        points = _within(document, "training", "curriculum", "points", "end")
        noise = _within(document, "training", "task_kwargs", "noise_std")
        model = _within(document, "model")
        sizes = dict(model) if isinstance(model, dict) else {}
        stated.append((garg, {**sizes, "n_points": points, "noise_std": noise}))
    return stated


def _within(document: object, *names: str) -> object:
    """Entry of nested mappings; None if missing."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document
