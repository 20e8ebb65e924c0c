"""Methods scored on version 2 of the suite of known answers, each against every truth.

A method is a function of an entry without its truth. docs/results/known_answers.md has the formula of each.
Run: python -m analyses.known.methods [FOLDER] (about half an hour of processor time); it writes a submission for each method that has none, so that a
run which was stopped goes on."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from analyses.known import gradients, masking
from analyses.known.alignment import alignment_of_asked
from analyses.known.gradients import Answer
from analyses.known.pruning import edge_pruning_of_large
from mechinterp import classify, name_algorithm
from mechinterp.known import Entry, Submission, Suite, score, suite
from mechinterp.known.truth import KINDS

VERSION = 2
SUBMISSIONS = Path(__file__).parent / "submissions"
N_RANDOM = 2
"""Number of random orders."""
Method = Callable[[Entry], Answer]


def exact(entry: Entry, *, known: Suite, kind: str) -> Answer:
    """The exact effects of one kind, as a method: how well one truth tells another."""
    truth = known[entry.name].truth
    named = {"heads": f"heads_{kind}", "edges": f"edges_{kind}"}
    found = {about: getattr(truth, name, None) for about, name in named.items()}
    return {about: each.value for about, each in found.items() if each is not None}


def label(entry: Entry) -> Answer:
    """The label of this package."""
    if entry.kind != "hand-made":
        return {}
    model = entry.checkpoint
    one = model.config.model.one_attention
    return {"label": classify(model).label if one else name_algorithm(model).label}


def components(entry: Entry) -> Answer:
    """Singular vectors of the QK and OV circuits of every head."""
    weights, found = entry.checkpoint.weights, []
    for circuit in (weights.W_Q @ weights.W_K.mT, weights.W_V @ weights.W_O):
        left, values, right = torch.linalg.svd(circuit)
        alive = values > 1e-6 * values.amax()
        found += [left.mT[alive], right[alive]]
    return {"components": torch.cat(found).numpy()}


def methods_of(known: Suite) -> Mapping[str, Method]:
    """All methods by name; the exact effects take their numbers from the suite."""
    return {
        **{f"exact, {kind}": partial(exact, known=known, kind=kind) for kind in KINDS},
        "attribution patching, in": gradients.patching_in,
        "attribution patching, out": gradients.patching_out,
        "integrated gradients": gradients.integrated,
        "EAP-IG inputs": gradients.eap_ig_inputs,
        "EAP-IG activations": gradients.eap_ig_activations,
        **{f"{m} masking": partial(masking.masking, method=m) for m in KINDS[2:]},
        "Shapley masking": masking.shapley,
        "attention weight": masking.attention_weight,
        "edge pruning": edge_pruning_of_large,
        "distributed alignment": alignment_of_asked,
        **{f"random {n}": partial(masking.random_order, seed=n) for n in range(N_RANDOM)},
        "label of this package": label,
        "singular vectors": components,
    }


def file_of(folder: Path, name: str) -> Path:
    """File of a method, such as eap-ig-inputs.json."""
    return folder / f"{'-'.join(re.findall(r'[a-z0-9]+', name.lower()))}.json"


def submit(name: str, method: Method, known: Suite, folder: Path) -> Path:
    """Score a method and write its submission."""
    found = score(partial(gradients.as_frames, method), known)
    return Submission.of(found, known, method=name).save(file_of(folder, name))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    known = suite(VERSION, trained="all")
    for name, method in methods_of(known).items():
        if not file_of(folder, name).exists():
            print(submit(name, method, known, folder), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else SUBMISSIONS)
