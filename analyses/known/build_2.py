"""Version 2 of the suite: its further hand-made models, and the truths of all entries."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from analyses.known.effects import all_effects
from analyses.known.held import held, held_by_trained
from analyses.known.models import Made
from analyses.known.models_2 import made_2, trained_2
from analyses.lib.measured import ROOT
from mechinterp.checkpoints.checkpoint import save
from mechinterp.known.entries import ARRAYS, FOLDERS, TRUTHS, Entry, documents_of
from mechinterp.known.truth import Truth

CARRIED = ("algorithm", "components", "learning_coefficient")
"""Answers that entries of version 1 keep."""
Arrays = dict[str, np.ndarray]
Stated = dict[str, tuple[str, Any, float]]
"""How each answer is known, its value and error."""


def main(folder: Path) -> None:
    """Write the hand-made models, truths.json and truths.safetensors."""
    documents, arrays = {}, {}
    for name, own in made_2().items():
        save(folder / name, own.config, own.weights, step=0)
    for name, header in headers(folder).items():
        entry = entry_of(folder, name, header)
        documents[name], found = with_variables(entry, *answered(entry, header))
        arrays |= {f"{name}/{truth}": values for truth, values in found.items()}
        print(name, {n: k["error"] for n, k in documents[name]["truth"].items()}, flush=True)
    write(folder, documents, arrays)


def write(folder: Path, documents: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Write truths.json and truths.safetensors; the hash of the first."""
    # safetensors writes the memory of an array as it lies, so that a view would be stored in another order.
    save_file({name: np.ascontiguousarray(each) for name, each in arrays.items()}, folder / ARRAYS)
    stated = {"arrays": _sha256(folder / ARRAYS), "entries": documents}
    text = json.dumps(stated, separators=(",", ":"), allow_nan=False) + "\n"
    (folder / TRUTHS).write_text(text, encoding="utf-8")
    print(hashlib.sha256(text.encode()).hexdigest())
    return hashlib.sha256(text.encode()).hexdigest()


def headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Kind, place and hash of the model of each entry, in order: those of version 1, further hand-made ones, trained ones."""
    kept = ("kind", "trained", "file", "sha256")
    first = {n: {k: d[k] for k in kept} | {"suite": 1} for n, d in documents_of(1).items()}
    further = {}
    for name, own in made_2().items():
        kind = "hand-made" if own.coefficient is None else "minimum"
        kind = "random" if name.startswith("random-") else kind
        further[name] = _header(folder / name, kind, trained=False) | {"suite": 2}
    trained = {n: _header(ROOT / "checkpoints" / n, "trained", trained=True) for n in trained_2()}
    return first | further | trained


def _header(path: Path, kind: str, *, trained: bool) -> dict[str, Any]:
    file = next(f for f in ("model.safetensors", "state.pt") if (path / f).is_file())
    return {"kind": kind, "trained": trained, "file": file, "sha256": _sha256(path / file)}


def entry_of(folder: Path, name: str, header: Mapping[str, Any]) -> Entry:
    """Entry without its truth."""
    path = folder / name
    if header["trained"]:
        path = ROOT / "checkpoints" / name
    elif header["suite"] == 1:
        path = FOLDERS[1] / name
    return Entry(name, header["kind"], path, Truth(), version=2)


def answered(entry: Entry, header: Mapping[str, Any]) -> tuple[dict[str, Any], Arrays]:
    """Document of an entry with its answers, and those that are arrays."""
    stated: Stated = {
        truth: ("computed exactly", *computed) for truth, computed in all_effects(entry).items()
    }
    stated |= _carried(entry.name) | _of_made(made_2().get(entry.name))
    truth, arrays = {}, {}
    for each, (how, value, error) in stated.items():
        truth[each] = {"how": how, "error": float(f"{error:.1g}")}
        if isinstance(value, np.ndarray):
            arrays[each] = value
        else:
            truth[each]["value"] = value
    return {**header, "truth": truth}, arrays


def with_variables(
    entry: Entry, document: Mapping[str, Any], arrays: Arrays
) -> tuple[dict[str, Any], Arrays]:
    """Document with the variables of an entry, and the arrays with the bases of their subspaces."""
    weights = entry.checkpoint.weights
    trained = document["trained"]
    variables = held_by_trained(weights) if trained else held(entry.name, weights.model)
    if not variables:
        return dict(document), arrays
    stated = [
        {"name": each.name, "hook": each.hook, "at": each.at, "size": len(each.basis)}
        | ({} if each.reference is None else {"reference": each.reference})
        for each in variables
    ]
    known = {f"variables/{each.name}": each.basis for each in variables if each.known}
    truth = dict(document["truth"])
    if known:
        truth["variables"] = {"how": "by construction", "error": 0.0}
    return {**document, "truth": truth, "variables": stated}, arrays | known


def _carried(name: str) -> Stated:
    """Answers of version 1 that stay."""
    truth = documents_of(1).get(name, {"truth": {}})["truth"]
    found: Stated = {}
    for each in CARRIED:
        if each in truth:
            value = truth[each]["value"]
            value = np.array(value, dtype=float) if isinstance(value, list) else value
            found[each] = (truth[each]["how"], value, truth[each]["error"])
    return found


def _of_made(own: Made | None) -> Stated:
    found: Stated = {}
    if own is not None and own.label is not None:
        found["algorithm"] = ("by construction", own.label, 0.0)
    if own is not None and own.components is not None:
        found["components"] = ("by construction", own.components, 0.0)
    if own is not None and own.coefficient is not None:
        found["learning_coefficient"] = ("proved", own.coefficient, 0.0)
    return found


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
