"""Importance of heads by masking on the clean prompts, Shapley values of masks, and random orders."""

import numpy as np
import torch

from analyses.known.gradients import Answer
from mechinterp import ablate
from mechinterp.known import Entry
from mechinterp.models.hooked.masks import pattern_name

MOST_HEADS = 12
"""Largest number of heads for which Shapley values are computed, as `ablate` allows."""


def masking(entry: Entry, *, method: str) -> Answer:
    """Rise of the squared error against the target when a head alone is masked.

    Args:
        method: "zero", "mean" or "resample".
    """
    found = ablate(entry.checkpoint, entry.pairs[0], what="heads", method=method)
    return {"heads": grid(entry, found.rise)}


def shapley(entry: Entry, *, method: str = "zero") -> Answer:
    """Shapley value of each head for the squared error against the target, over all sets of masked heads."""
    model = entry.checkpoint.config.model
    if not 1 < model.n_layers * model.n_heads <= MOST_HEADS:
        return {}
    found = ablate(entry.checkpoint, entry.pairs[0], what="shapley", method=method)
    return {"heads": found.grid("shapley")}


def grid(entry: Entry, values: np.ndarray) -> np.ndarray:
    model = entry.checkpoint.config.model
    return np.asarray(values).reshape(model.n_layers, model.n_heads)


@torch.no_grad()
def attention_weight(entry: Entry) -> Answer:
    """Largest absolute attention weight of the query, mean over prompts; none for recurrent layers."""
    if entry.checkpoint.config.model.recurrent:
        return {}
    hooked = entry.checkpoint.predictor.hooked
    names = [pattern_name(layer) for layer in range(hooked.n_layers)]
    _, passed = hooked.run_noting(hooked.inputs(entry.pairs[0]), names)
    largest = [passed[name][:, :, -1].abs().amax(-1).mean(0) for name in names]
    return {"heads": torch.stack(largest).numpy()}


def random_order(entry: Entry, *, seed: int) -> Answer:
    """Random numbers, other ones for each entry and seed."""
    model = entry.checkpoint.config.model
    rng = np.random.default_rng([seed, *entry.name.encode()])
    heads = rng.random((model.n_layers, model.n_heads))
    return {"heads": heads, "edges": rng.random(len(entry.edges()))}
