"""What lies in `data/`, and how near a number must be to the stored one."""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

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
    "recurrent": "checkpoints/gated-delta-h1-drift0.95-s0",
    "deep linear": "checkpoints/sparse-h4-noise0.1-s0",
    "deep softmax": f"{FILES}/deep-softmax",
    "gpt2": f"{FILES}/garg.pt",
    "encoder": f"{FILES}/encoder.pt",
}
"""A model of each kind."""
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


def distance(found: np.ndarray, stored: np.ndarray, scale: float | np.ndarray) -> float:
    """The largest difference, as a share of the scale; infinite for another shape or infinities."""
    if found.shape != stored.shape or not np.isfinite(found).all():
        return math.inf
    return float((np.abs(found - stored) / scale).max())
