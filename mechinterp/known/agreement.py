"""Agreement of rankings, circuits and subspaces with the truths of version 2, each of which is a separate score.

A tie in a ranking counts as the mean over the orders of what is tied.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from mechinterp.analysis.patching.circuit import circuit_faithfulness
from mechinterp.analysis.stats import average_ranks
from mechinterp.known.entries import Entry
from mechinterp.known.truth import KINDS
from mechinterp.known.variables import (
    angle_score,
    as_numbers,
    control_score,
    interchange_score,
    require_subspace,
    width_of,
)

MATTERS = 0.01
"""A head or edge matters if its effect is above this fraction of the largest."""
NO_EFFECT = 1e-9
"""An effect or a value below this fraction of the largest is 0."""
N_ORDERS = 4
"""Number of orders of tied edges whose circuits are run."""
WHAT = {
    "in": "patched in",
    "out": "patched out",
    "zero": "set to zero",
    "mean": "set to the mean",
    "resample": "set to the value on another prompt",
}
MEANINGS_2 = {
    **{
        f"{what} {kind} {score}": (meaning.format(f"single {what} {WHAT[kind]}"), 1.0, random)
        for what, kinds in (("edges", KINDS[:2]), ("heads", KINDS))
        for kind, (score, meaning, random) in product(
            kinds,
            (
                ("spearman", "rank correlation with the effects of {}", 0.0),
                ("auroc", f"AUROC for effects above {MATTERS:.0%} of the largest, {{}}", 0.5),
            ),
        )
    },
    **{
        f"shapley {kind} spearman": (
            f"rank correlation with the Shapley values, heads {WHAT[kind]}",
            1.0,
            0.0,
        )
        for kind in KINDS
    },
    "circuits in": ("circuits of heads patched in: 1 for the best of each size", 1.0, 0.0),
    "circuits out": ("circuits of heads, all others patched out: 1 for the best", 1.0, 0.0),
    "subspace interchange": ("R² with interchange in the true subspace", 1.0, np.nan),
    "subspace cosine": ("mean squared cosine of the angles to the true subspace", 1.0, np.nan),
    "subspace control": ("R² that interchange reaches on random weights", 0.0, np.nan),
}
"""Meaning of each score of version 2 that version 1 lacks, its best value, and that of a random order."""


def score_edges_of_all(entry: Entry, ranking: pd.DataFrame) -> dict[str, float]:
    """Scores of a ranking of all edges: agreement with each truth of edges, and faithfulness of the first edges.

    Args:
        ranking: `entry.edges()` with a column "value"; the sign is ignored.
    Raises:
        ValueError: If an edge is missing, occurs twice or has no finite value.
    Source:
        CPR and CMD: Mueller et al. 2025, "MIB", arXiv 2504.13151.
    """
    values = edge_values(entry, ranking)
    found: dict[str, float] = {}
    for kind in KINDS[:2]:
        known = getattr(entry.truth, f"edges_{kind}")
        if known is not None:
            found |= agreement(f"edges {kind}", values, known.value)
    return found | _areas(entry, rounded(values)) if found else {}


def edge_values(entry: Entry, ranking: Any) -> Float[np.ndarray, " edge"]:
    """Value of each edge of an entry, in the order of `entry.edges()`.

    Raises:
        ValueError: If an edge is missing, occurs twice or has no finite value.
    """
    places = entry.edges()
    if not isinstance(ranking, pd.DataFrame):
        raise ValueError(f"edges must be a DataFrame, got a {type(ranking).__name__}.")
    if not {"from", "to", "value"} <= set(ranking):
        raise ValueError(
            f"edges must have the columns from, to and value, got {', '.join(map(str, ranking))}."
        )
    merged = places.merge(ranking, on=["from", "to"], how="left")
    values = as_numbers("edges, column value,", merged["value"])
    if len(ranking) != len(places) or len(merged) != len(places) or not np.isfinite(values).all():
        raise ValueError(
            f"edges must give each of the {len(places)} edges of {entry.name} one finite value."
        )
    return values


def _areas(entry: Entry, values: Float[np.ndarray, " edge"]) -> dict[str, float]:
    """CPR and CMD of the circuits of the first edges, mean over orders of ties."""
    places, (clean, corrupted) = entry.edges(), entry.pairs
    tied = len(np.unique(values)) < len(values)
    areas = []
    for seed in range(N_ORDERS if tied else 1):
        order = np.lexsort([np.random.default_rng(seed).random(len(values)), -values])
        circuit = circuit_faithfulness(
            entry.checkpoint, places.iloc[order], clean, corrupted=corrupted, nodes="all"
        )
        areas.append((circuit.cpr, circuit.cmd))
    cpr, cmd = np.mean(areas, 0).tolist()
    return {"edges cpr": cpr, "edges cmd": cmd}


def score_heads_of_all(entry: Entry, ranking: Float[np.ndarray, "layer head"]) -> dict[str, float]:
    """Scores of a ranking of heads: agreement with each truth of heads and with each kind of Shapley values, and the
    circuits of the first heads.

    Args:
        ranking: Importance of each head; the sign is ignored.
    Raises:
        ValueError: If it is no finite array [layer, head].
    """
    model = entry.checkpoint.config.model
    shape, values = (model.n_layers, model.n_heads), as_numbers("heads", ranking)
    if values.shape != shape or not np.isfinite(values).all():
        raise ValueError(
            f"heads must be finite numbers {list(shape)}, got an array {list(values.shape)}."
        )
    found: dict[str, float] = {}
    if values.size == 1:
        return found
    for kind in KINDS:
        known, shares = (getattr(entry.truth, f"{of}_{kind}") for of in ("heads", "shapley"))
        if known is not None:
            found |= agreement(f"heads {kind}", values.ravel(), known.value.ravel())
        if shares is not None:
            scores = agreement(f"shapley {kind}", values.ravel(), shares.value.ravel())
            found |= {name: each for name, each in scores.items() if name.endswith("spearman")}
    size = rounded(values.ravel())
    return found | _of_circuits(entry, lambda game: expected_by_size(game, size))


def score_circuits(entry: Entry, circuits: Bool[np.ndarray, "size layer head"]) -> dict[str, float]:
    """Scores of one circuit of heads for each size, in place of those of the first heads of a ranking.

    Args:
        circuits: True for the heads of the circuit; circuit k has k heads, from 0 to all.
    Raises:
        ValueError: If there is not one circuit of each size.
    """
    model = entry.checkpoint.config.model
    n = model.n_layers * model.n_heads
    kept = as_numbers("circuits", circuits)
    shape = (n + 1, model.n_layers, model.n_heads)
    if kept.shape != shape or (kept.astype(bool).reshape(n + 1, -1).sum(1) != range(n + 1)).any():
        raise ValueError(
            f"circuits must be truth values {list(shape)}, with k heads in circuit k, got {list(kept.shape)}."
        )
    places = kept.astype(bool).reshape(n + 1, -1) @ 2 ** np.arange(n)
    return _of_circuits(entry, lambda game: game[places])


def _of_circuits(entry: Entry, curve_of: Any) -> dict[str, float]:
    """1 minus what circuits lack to the best of each size, over what random circuits lack to it."""
    found = {}
    for kind in KINDS[:2]:
        known = getattr(entry.truth, f"subsets_{kind}")
        if known is None or len(known.value) < 4:
            continue
        # The complement of a circuit is patched out.
        game = known.value if kind == "in" else known.value[::-1]
        best, mean = by_size(game)
        scale = (best - mean).sum()
        if scale > NO_EFFECT * np.abs(game).max():
            found[f"circuits {kind}"] = float(1 - (best - curve_of(game)).sum() / scale)
    return found


def by_size(game: Float[np.ndarray, " subset"]) -> tuple[np.ndarray, np.ndarray]:
    """Best and mean value of the sets of each size.

    Example:
        >>> [each.tolist() for each in by_size(np.array([0.0, 1.0, 2.0, 5.0]))]
        [[0.0, 2.0, 5.0], [0.0, 1.5, 5.0]]
    """
    sizes = _sizes(len(game))
    of_size = [game[sizes == k] for k in range(sizes[-1] + 1)]
    return np.array([each.max() for each in of_size]), np.array([each.mean() for each in of_size])


def expected_by_size(
    game: Float[np.ndarray, " subset"], values: Float[np.ndarray, " player"]
) -> Float[np.ndarray, " size"]:
    """Value of the set of the k largest players for each k, mean over the orders of ties.

    Example:
        >>> expected_by_size(np.array([0.0, 1.0, 2.0, 5.0]), np.array([3.0, 1.0])).tolist()
        [0.0, 1.0, 5.0]
        >>> expected_by_size(np.array([0.0, 1.0, 2.0, 5.0]), np.array([1.0, 1.0])).tolist()
        [0.0, 1.5, 5.0]
    """
    sizes, indices, bits = _sizes(len(game)), np.arange(len(game)), 2 ** np.arange(len(values))
    last = np.sort(values)[::-1]
    found = [game[0]]
    for k in range(1, len(values) + 1):
        sure, possible = bits[values > last[k - 1]].sum(), bits[values >= last[k - 1]].sum()
        allowed = (indices & sure == sure) & (indices & ~possible == 0) & (sizes == k)
        found.append(game[allowed].mean())
    return np.array(found)


def _sizes(n: int) -> Int[np.ndarray, " subset"]:
    return np.array([index.bit_count() for index in range(n)])


def agreement(
    name: str, values: Float[np.ndarray, " item"], effects: Float[np.ndarray, " item"]
) -> dict[str, float]:
    """Rank correlation of absolute values and effects, and AUROC for the effects that matter; a score without an answer,
    such as AUROC if all matter, is left out.

    Example:
        >>> agreement("heads in", np.array([3.0, 2.0, 2.0]), np.array([4.0, 0.0, 1.0]))
        {'heads in spearman': 0.8660254037844387, 'heads in auroc': 0.75}
    """
    values, truth = rounded(values), rounded(effects)
    if np.ptp(truth) == 0:
        return {}
    ranks = average_ranks(values), average_ranks(truth)
    said = np.ptp(values) > 0
    found = {f"{name} spearman": float(np.corrcoef(*ranks)[0, 1]) if said else 0.0}
    matters = truth > MATTERS * truth.max()
    if not matters.all():
        found[f"{name} auroc"] = auroc(matters, values)
    return found


def rounded(values: np.ndarray) -> np.ndarray:
    """Absolute values; those that differ from the one before by rounding are equal to it, or 0.

    Example:
        >>> rounded(np.array([-2.0, 1.0, 1.0 + 1e-12, 1e-12])).tolist()
        [2.0, 1.0, 1.0, 0.0]
    """
    sizes = np.abs(np.asarray(values, dtype=float))
    order = np.argsort(sizes)
    step = np.diff(sizes[order], prepend=0.0) > NO_EFFECT * sizes.max(initial=0.0)
    # Each value becomes the first of its group of equal ones; the group of 0 is 0.
    firsts = np.concatenate([[0.0], sizes[order][step]])
    equal = np.empty_like(sizes)
    equal[order] = firsts[np.cumsum(step)]
    return equal


def auroc(positive: Bool[np.ndarray, " unit"], values: Float[np.ndarray, " unit"]) -> float:
    """Chance that a positive has a larger value than a negative; equal values count half.

    Example:
        >>> auroc(np.array([True, False, False]), np.array([0.5, 0.5, 0.1]))
        0.75
    """
    n = int(positive.sum())
    above = average_ranks(values)[positive].sum() - n * (n + 1) / 2
    return float(above / (n * (len(values) - n)))


def score_subspaces(entry: Entry, bases: Mapping[str, Any]) -> dict[str, float]:
    """Scores of the subspaces that hold the variables of an entry, mean over variables.

    Args:
        bases: Basis of each variable by its name, [size, width] of its place.
    Raises:
        ValueError: If a name is none of the entry's variables, or a basis has another shape.
    """
    named = {variable.name: variable for variable in entry.variables}
    if not isinstance(bases, Mapping) or bases.keys() - named.keys():
        got = list(bases) if isinstance(bases, Mapping) else type(bases).__name__
        raise ValueError(
            f"subspace must be a dict with some of {', '.join(named) or 'no name'}, got {got}."
        )
    found: dict[str, list[float]] = {}
    known = {} if entry.truth.variables is None else entry.truth.variables.value
    hooked, pair = entry.hooked, entry.base_and_source
    for name, variable in named.items():
        true = known.get(name)
        if name not in bases:
            scores = {} if true is None else {"interchange": 0.0, "cosine": 0.0}
        else:
            basis = require_subspace(variable, bases[name], width_of(hooked, variable, pair[0]))
            scores = (
                {"control": control_score(hooked, variable, basis, pair)}
                if true is None
                else {
                    "interchange": interchange_score(hooked, variable, basis, true, pair),
                    "cosine": angle_score(basis, true),
                }
            )
        for score, value in scores.items():
            found.setdefault(f"subspace {score}", []).append(value)
    return {score: float(np.mean(values)) for score, values in found.items()}
