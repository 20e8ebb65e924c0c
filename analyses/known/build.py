"""Writes a version of the suite: hand-made models and truths. A published version is never written again.

Run: python -m analyses.known.build FOLDER [--version 2] (ten minutes)"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from analyses.known import build_2, truths
from analyses.known.models import Made, made
from analyses.lib.measured import ROOT
from mechinterp.checkpoints.checkpoint import save
from mechinterp.known.entries import TRUTHS, Entry
from mechinterp.known.truth import Truth

BUNDLED = (
    *("garg-gpt2", "garg-tiny-s0", "linear-merged-s0", "linear-separate-s0", "pool-linear-m4-s0"),
    *(
        "pool-linear-m16-s0",
        "softmax-h2-s0",
        "softmax-h4-s0",
        "sparse-h4-noise0.1-s0",
        "tanh-h2-s0",
    ),
)
"""Trained models in the package."""
FURTHER = (
    *("pool-gpt2-m16-s0", "pool-gpt2-none-s0", "sparse-h8-noise0.1-s0", "linear-rank2-s2"),
    "d8s2-softmax-block-h8x9-l3-noise0.1-lr0.001-s0",
)
"""Trained models in a clone alone."""
COEFFICIENTS = {"linear-merged-s0": 8.0, "linear-separate-s0": 8.0, "linear-rank2-s2": 32.0}
"""Learning coefficients of trained models that end at a minimum: m (2 d - m) / 2 with m = d."""
SHAPLEY_PROMPTS = 4096


def document_of(entry: Entry, own: Made | None) -> dict[str, Any]:
    """Answers of an entry."""
    model, known = entry.checkpoint, {}
    if model.config.model.n_layers > 1:
        known["edges"] = ("computed exactly", *truths.edges(model, *entry.pairs))
    known["heads"] = ("computed exactly", *truths.heads(model, *entry.pairs))
    if model.config.model.n_layers == 1 and model.config.model.n_heads > 1:
        prompts = entry.sample(SHAPLEY_PROMPTS)
        known["shapley"] = ("computed exactly", *truths.shapley(model, prompts))
    if own is not None and own.label is not None:
        known["algorithm"] = ("by construction", own.label, 0.0)
    if own is not None and own.components is not None:
        known["components"] = ("by construction", own.components, 0.0)
    coefficient = COEFFICIENTS.get(entry.name) if own is None else own.coefficient
    if coefficient is not None:
        known["learning_coefficient"] = ("proved", coefficient, 0.0)
    return {
        name: {"how": how, "value": _plain(value), "error": float(f"{error:.1g}")}
        for name, (how, value, error) in known.items()
    }


def _plain(value: object) -> object:
    """Nested lists in place of an array, with None in place of NaN."""
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim > 1:
        return [_plain(row) for row in value]
    return [None if np.isnan(each) else float(each) for each in value]


def main(folder: Path) -> None:
    documents, hand_made = {}, made()
    for name, own in hand_made.items():
        save(folder / name, own.config, own.weights, step=0)
    for name in (*hand_made, *BUNDLED, *FURTHER):
        own = hand_made.get(name)
        path = ROOT / "checkpoints" / name if own is None else folder / name
        kind = "trained" if own is None else "hand-made" if own.coefficient is None else "minimum"
        entry = Entry(name, kind, path, Truth())
        file = next(f for f in ("model.safetensors", "state.pt") if (path / f).is_file())
        hashed = hashlib.sha256((path / file).read_bytes()).hexdigest()
        stated = {"kind": kind, "trained": own is None, "file": file, "sha256": hashed}
        documents[name] = stated | {"truth": document_of(entry, own)}
        print(name, {n: (k["how"], k["error"]) for n, k in documents[name]["truth"].items()})
    text = json.dumps(documents, separators=(",", ":"), allow_nan=False)
    (folder / TRUTHS).write_text(text + "\n", encoding="utf-8")
    print(hashlib.sha256((text + "\n").encode()).hexdigest())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", type=int, choices=(1, 2), default=1)
    given = parser.parse_args()
    {1: main, 2: build_2.main}[given.version](given.folder)
