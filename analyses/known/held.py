"""Variables that the models of the suite hold: where, and in which subspace."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from analyses.known.graphs import D_X, S, T, Y
from analyses.known.models import NOISES
from analyses.known.models_2 import WIDTH
from mechinterp.config import ModelConfig
from mechinterp.models.constructions.descent import rotation
from mechinterp.models.weights import Weights

QUERY = -1
READ = -2
"""Index of the state that the query reads: that after the last pair."""
DESCENT = r"(gd|preconditioned|redundant-gd|opposed-gd|backup-gd|mlp-carry|mlp-split|softmax-stack|gd-plus-plus)-\d"
VARIANTS = {
    r"-rotated$": lambda width: rotation(width, seed=1).numpy(),
    r"-noise-[\d.]+$": lambda width: rotation(width, seed=3).numpy(),
    r"-dead-heads$": np.eye,
}
"""Endings of names, and the matrix by which the stream of the model without it is multiplied."""


@dataclass(frozen=True, eq=False)
class Held:
    """A variable in a model."""

    name: str
    hook: str
    at: int | None
    """Position; None: all."""
    basis: np.ndarray
    """[size, width]."""
    reference: str | None = None
    """Model that computes the variable exactly; None: the model itself."""
    known: bool = True
    """False for random weights, which hold nothing."""


def held(name: str, model: ModelConfig) -> list[Held]:
    """Variables of an entry by its name.

    The strongest noise leaves no variable in its place: at 20%, interchange of x in gd-plus-plus-2 is worse than none.
    """
    if name.startswith("random-"):
        like = {"random-gd-3": "gd-3-rotated"}.get(name, name.removeprefix("random-"))
        return [replace(each, known=False) for each in held(like, model)]
    if name.startswith("wide-"):
        plain = name.removeprefix("wide-")
        R = rotation(WIDTH, seed=5).numpy()
        own = held(plain, replace(model, d_model=D_X + 1))
        return [replace(h, basis=h.basis @ R[: D_X + 1], reference=plain) for h in own]
    if name.endswith(f"-noise-{NOISES[-1]:g}"):
        return []
    for ending, matrix in VARIANTS.items():
        if re.search(ending, name):
            plain = re.sub(ending, "", name)
            return [
                replace(each, basis=each.basis @ matrix(each.basis.shape[1]), reference=plain)
                for each in held(plain, model)
            ]
    return list(_of_plain(name, model))


def _of_plain(name: str, model: ModelConfig) -> Iterator[Held]:
    if name.startswith("recurrent") and model.n_layers * model.n_heads == 1:
        width = D_X + 1
        basis = np.zeros((D_X, width, width))
        basis[range(D_X), range(D_X), Y] = 1
        yield Held("state", "blocks.0.attn.hook_state", READ, basis.reshape(D_X, -1))
        return
    width = model.d_model or 0
    entries = np.eye(width)
    if re.fullmatch(r"preprocess-\d", name):
        reweighted = entries[D_X + 1 :]
        yield Held("reweighted x", "blocks.0.hook_resid_post", None, reweighted)
    if re.fullmatch(r"mlp-.*|backup-or|joint-and", name):
        two = r"mlp-product-1|mlp-max-\d|mlp-min-\d|backup-or|joint-and"
        slots = entries[[S, T]] if re.fullmatch(two, name) else entries[[S]]
        yield Held("input of the MLP of layer 1", "blocks.0.hook_resid_mid", QUERY, slots)
    if re.fullmatch(rf"{DESCENT}.*|preprocess-\d", name):
        first = 1 if name.startswith("preprocess") else 0
        for layer in range(first, model.n_layers):
            hook = f"blocks.{layer}.hook_resid_post"
            yield Held(f"prediction after layer {layer + 1}", hook, QUERY, entries[[Y]])
    if re.fullmatch(r"gd-plus-plus-\d", name):
        for layer in range(model.n_layers - 1):
            hook = f"blocks.{layer}.hook_resid_post"
            yield Held(f"x after layer {layer + 1}", hook, None, entries[:D_X])


def held_by_trained(weights: Weights) -> list[Held]:
    """The prediction of a trained model, in the directions that a read-out without a norm reads."""
    model = weights.model
    if model.final_norm or model.norm == "after":
        return []
    hook = f"blocks.{model.n_layers - 1}.hook_resid_post"
    basis = weights.reading[1].double().numpy(force=True).T
    return [Held(f"prediction after layer {model.n_layers}", hook, QUERY, basis)]
