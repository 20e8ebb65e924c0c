"""What lies in `data/`, and how near a number must be to the stored one."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from tests.golden import subjects

DATA = Path(__file__).parent / "data"
FILES = "tests/golden/files"
KINDS = {
    "softmax": "checkpoints/softmax-h4-s0",
    "several responses": "checkpoints/two-tasks-h4-s0",
    "tanh": "checkpoints/tanh-h2-s0",
    "linear merged": "checkpoints/linear-merged-s0",
    "linear separate": "checkpoints/linear-separate-s0",
    "deep linear": "checkpoints/sparse-h4-noise0.1-s0",
    "deep softmax": f"{FILES}/deep-softmax",
    "gpt2": f"{FILES}/garg.pt",
    "encoder": f"{FILES}/encoder.pt",
}
"""A model of each kind."""
RANDOM = ("gpt2", "encoder")
"""Kinds whose files hold random weights: no reading of them predicts, and they are read anyway."""
COMMANDS = {
    "classify": ("--n-prompts", "128"),
    "ablate": ("--n-prompts", "64"),
    "probe": ("--n-prompts", "128"),
    "fit": ("--n-prompts", "128", "--context-length", "20", "--context-length", "40"),
    "prune": ("--n-prompts", "256"),
}
NOTHING = 1e-12
"""A number that is rounding alone."""
METHODS = ("zero", "mean", "resample")
STEPS = 200
SLOW_STEPS = {"sparse-wide": 20, "garg-tiny": 20, "pool-gpt2": 20, "pool-linear": 20}
"""Training steps of the presets, and of those with slow steps."""
SNAPSHOT_PROMPTS = 16


def read_json(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def write_json(name: str, document: Mapping) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (DATA / f"{name}.json").write_text(text + "\n", encoding="utf-8")


@cache
def read_tensors(name: str) -> dict[str, Tensor]:
    return load_file(DATA / f"{name}.safetensors")


def stored_prompts(name: str, n_prompts: int | None = None) -> dict[str, Tensor]:
    """Prompts by field, the first of them if a number is given."""
    found = read_tensors("prompts")
    fields = [key.rpartition("/")[2] for key in found if key.rpartition("/")[0] == name]
    return {field: found[f"{name}/{field}"][:n_prompts] for field in fields}


def masks_of(name: str, hints: subjects.Hints) -> list[list[subjects.Head]]:
    """No mask, then each head alone."""
    return [[], *([head] for head in subjects.heads_of(name, hints))]


def command_line(command: str, kind: str) -> tuple[str, ...]:
    """A command about the model of a kind, with what its file does not say."""
    hints = read_json("subjects")[KINDS[kind]]["hints"]
    given = [
        part
        for name, value in hints.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    if kind in RANDOM:
        given.append("--anyway")
    return (command, KINDS[kind], *given, "--quiet", *COMMANDS[command])


def distance(found: np.ndarray, stored: np.ndarray, scale: float | np.ndarray) -> float:
    """The largest difference, as a share of the scale; infinite for another shape or infinities."""
    if found.shape != stored.shape or not np.isfinite(found).all():
        return math.inf
    return float((np.abs(found - stored) / scale).max())


def differences(
    found: object,
    stored: object,
    tolerance: float,
    looser: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Where two JSON documents differ: a line each.

    Numbers with a decimal point may differ by a share of the largest in their column, which is the
    same field of all rows of a list; everything else is equal, but that a decimal within a text may
    differ in its last digit. `looser` multiplies the tolerance of a column.
    """
    ours, theirs = dict(_leaves(found)), dict(_leaves(stored))
    lines = [f"{'.'.join(p)}: new" for p in ours.keys() - theirs.keys()]
    lines += [f"{'.'.join(p)}: gone" for p in theirs.keys() - ours.keys()]
    largest: dict[tuple[str, ...], float] = defaultdict(float)
    for place, value in theirs.items():
        if isinstance(value, float):
            largest[_column(place)] = max(largest[_column(place)], abs(value))
    for place in ours.keys() & theirs.keys():
        now, before = ours[place], theirs[place]
        if isinstance(now, float) and isinstance(before, float):
            share = tolerance * looser.get(place[-1], 1.0)
            allowed = max(share * largest[_column(place)], NOTHING if tolerance else 0)
            same = abs(now - before) <= allowed
        elif isinstance(now, str) and isinstance(before, str):
            same = _same_text(now, before)
        else:
            same = type(now) is type(before) and now == before
        if not same:
            lines.append(f"{'.'.join(place)}: {now!r}, was {before!r}")
    return sorted(lines)


def _leaves(
    document: object, place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    inner: list[tuple[str, object]] | None = None
    if isinstance(document, dict):
        inner = [(str(key), value) for key, value in document.items()]
    elif isinstance(document, list):
        inner = [(f"[{index}]", value) for index, value in enumerate(document)]
    if not inner:
        yield place, document
        return
    for key, value in inner:
        yield from _leaves(value, (*place, key))


def _column(place: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("[]" if part.startswith("[") else part for part in place)


def _same_text(now: str, before: str) -> bool:
    decimal = re.compile(r"\d+\.\d+")
    if decimal.sub("#", now) != decimal.sub("#", before):
        return False
    for one, other in zip(decimal.findall(now), decimal.findall(before), strict=True):
        unit = 10.0 ** -len(other.partition(".")[2])
        if len(one) != len(other) or abs(float(one) - float(other)) > 1.5 * unit:
            return False
    return True
