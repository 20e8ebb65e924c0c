"""Importance of heads by masking on the clean prompts, Shapley values of masks, and random orders."""

import numpy as np

from analyses.known.gradients import Answer
from mechinterp import ablate
from mechinterp.known import Entry

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


def random_order(entry: Entry, *, seed: int) -> Answer:
    """Random numbers, other ones for each entry and seed."""
    model = entry.checkpoint.config.model
    rng = np.random.default_rng([seed, *entry.name.encode()])
    heads = rng.random((model.n_layers, model.n_heads))
    return {"heads": heads, "edges": rng.random(len(entry.edges()))}
