"""Scores of other people's methods on the suite."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.patching.circuit import circuit_faithfulness
from mechinterp.display import Result
from mechinterp.known.agreement import (
    MATTERS,
    MEANINGS_2,
    NO_EFFECT,
    auroc,
    edge_values,
    score_circuits,
    score_edges_of_all,
    score_heads_of_all,
    score_subspaces,
)
from mechinterp.known.entries import Entry, Suite, edge_place, suite
from mechinterp.known.variables import as_numbers
from mechinterp.progress import progress

MEANINGS = {
    **MEANINGS_2,
    "edges spearman": ("rank correlation with the effects of single edges", 1.0, 0.0),
    "edges kendall": ("Kendall's tau with the effects of single edges", 1.0, 0.0),
    "edges auroc": (f"AUROC for edges above {MATTERS:.0%} of the largest effect", 1.0, 0.5),
    "edges cpr": ("area under the faithfulness of the first edges", 1.0, np.nan),
    "edges cmd": ("area between the faithfulness of the first edges and 1", 0.0, np.nan),
    "heads spearman": ("rank correlation with the effects of single heads", 1.0, 0.0),
    "heads kendall": ("Kendall's tau with the effects of single heads", 1.0, 0.0),
    "heads auroc": (f"AUROC for heads above {MATTERS:.0%} of the largest effect", 1.0, 0.5),
    "shapley spearman": ("rank correlation with the Shapley values", 1.0, 0.0),
    "label right": ("1 if the label is the algorithm", 1.0, np.nan),
    "label wrong": ("1 if the label is another one, not undetermined", 0.0, np.nan),
    "coefficient error": ("estimate minus learning coefficient, over the latter", 0.0, np.nan),
    "coefficient within 2 sem": ("1 if the error is at most two standard errors", 1.0, np.nan),
    "components cosine": ("mean cosine of the best matching to the components", 1.0, np.nan),
}
"""Meaning of each score, its best value, and that of a random order (NaN: depends on the entry)."""
NO_LABEL = "undetermined"
AIM, AIMS = "aim", ("in", "out")
"""Key and values of what a method estimates, effects patched in or out; it is scored on all truths all the same."""


@dataclass(frozen=True, eq=False, repr=False)
class Scores(Result):
    """Scores of one method on the entries of a suite."""

    method: str
    rows: pd.DataFrame
    """One row per entry and score: entry, kind, score, value."""
    seconds: Mapping[str, float]
    """Time of the method on each entry."""

    def __repr__(self) -> str:
        parts = [f"{r.score} {r.mean:.3g} ± {r.sem:.1g}" for r in self.summary().itertuples()]
        return f"Scores({self.method} on {len(self.seconds)} entries: {'; '.join(parts)})"

    def to_frame(self) -> pd.DataFrame:
        """One row per entry and score."""
        return self.rows.copy()

    def summary(self, by: str | None = None) -> pd.DataFrame:
        """Mean of each score over entries and its standard error, with the best value and that of a random order.

        Args:
            by: "kind" for a row per score and kind of entry.
        """
        keys = ["score"] if by is None else ["score", by]
        grouped = self.rows.groupby(keys, sort=False)["value"]
        frame = grouped.agg(mean="mean", sem="sem", entries="count").reset_index()
        meanings = pd.DataFrame(
            [(n, *m) for n, m in MEANINGS.items()], columns=["score", "meaning", "best", "random"]
        )
        return frame.merge(meanings, on="score")

    def plot(self) -> go.Figure:
        """Mean of each score over entries, with its standard error."""
        frame = self.summary()
        bars = {self.method: (frame["mean"].to_numpy(), frame["sem"].fillna(0).to_numpy())}
        return figures.bars(
            frame["score"].tolist(), bars, title=f"Scores of {self.method}", y_title="mean score"
        )


Method = Callable[[Entry], Mapping[str, Any]]


def score(method: Method, entries: Suite | None = None) -> Scores:
    """Scores of a method on all entries of a suite.

    Args:
        method: Function of an entry, which has no truth. It returns a dict with some of: "edges" (the frame `entry.edges()`
            with a column "value"), "heads" (an array [layer, head]), "learning_coefficient" (estimate and standard error),
            "label" (a name), "components" (an array [component, d_model]). Version 2 also has "circuits" (truth values [size,
            layer, head], circuit k with k heads), "subspace" (a dict with the basis of each of `entry.variables`), and
            "aim" ("in" or "out"), which changes no score. For an empty dict the entry is left out.
        entries: The suite; None: the newest version with the trained models of the package.
    Raises:
        ValueError: If the method returns something else, or of wrong shape.
    Example:
        >>> import numpy as np
        >>> from mechinterp.known import suite
        >>> def random_heads(entry):
        ...     model = entry.checkpoint.config.model
        ...     return {"heads": np.random.default_rng(0).random((model.n_layers, model.n_heads))}
        >>> score(random_heads, suite(1, trained="none")).to_frame().columns.tolist()
        ['entry', 'kind', 'score', 'value']
    """
    entries, rows, seconds = suite() if entries is None else entries, [], {}
    name = getattr(method, "__name__", type(method).__name__)
    for entry in progress(list(entries.values()), "scoring"):
        start = time.process_time()
        answers = method(entry.without_truth)
        seconds[entry.name] = time.process_time() - start
        scored = SCORED if entry.version == 1 else SCORED_2
        if not isinstance(answers, Mapping) or answers.keys() - {AIM, *scored}:
            got = list(answers) if isinstance(answers, Mapping) else type(answers).__name__
            raise ValueError(
                f"{name} must return a dict with some of {', '.join([*scored, AIM])}, got {got}."
            )
        if answers.get(AIM, "in") not in AIMS:
            raise ValueError(f"{AIM} must be one of {', '.join(AIMS)}, got {answers[AIM]!r}.")
        found: dict[str, float] = {}
        # Circuits that a method names come after those of its ranking, and replace their scores.
        for about, score_of in scored.items():
            if about in answers:
                found |= score_of(entry, answers[about])
        rows += [(entry.name, entry.kind, key, value) for key, value in found.items()]
    return Scores(name, pd.DataFrame(rows, columns=["entry", "kind", "score", "value"]), seconds)


def score_edges(entry: Entry, ranking: pd.DataFrame) -> dict[str, float]:
    """Scores of a ranking of edges between heads: rank correlations, AUROC, and faithfulness of the first edges.

    Args:
        ranking: `entry.edges()` with a column "value"; the sign is ignored, and ties are broken at random.
    Raises:
        ValueError: If an edge is missing, occurs twice or has no finite value.
    Source:
        CPR and CMD: Mueller et al. 2025, "MIB", arXiv 2504.13151.
    """
    known = entry.truth.edges
    if known is None:
        return {}
    places, values = entry.edges(), edge_values(entry, ranking)
    at = np.array([edge_place(*edge) for edge in places.itertuples(index=False)])
    found = _agreement("edges", values, known.value[tuple(at.T)])
    order = np.lexsort([np.random.default_rng(0).random(len(values)), -np.abs(values)])
    clean, corrupted = entry.pairs
    circuit = circuit_faithfulness(entry.checkpoint, places.iloc[order], clean, corrupted=corrupted)
    return found | {"edges cpr": circuit.cpr, "edges cmd": circuit.cmd}


def score_heads(entry: Entry, ranking: Float[np.ndarray, "layer head"]) -> dict[str, float]:
    """Scores of a ranking of heads: rank correlations and AUROC for the effects of single heads, and rank correlation with
    the Shapley values.

    Args:
        ranking: Importance of each head; the sign is ignored.
    Raises:
        ValueError: If it is no finite array [layer, head].
    """
    found: dict[str, float] = {}
    for name, known in (("heads", entry.truth.heads), ("shapley", entry.truth.shapley)):
        if known is not None:
            values = as_numbers("heads", ranking)
            if values.shape != known.value.shape or not np.isfinite(values).all():
                shape = list(known.value.shape)
                raise ValueError(
                    f"heads must be finite numbers {shape}, got an array {list(values.shape)}."
                )
            if values.size > 1:
                found |= _agreement(name, values.ravel(), known.value.ravel())
    return {name: value for name, value in found.items() if name in MEANINGS}


def score_learning_coefficient(entry: Entry, answer: Any) -> dict[str, float]:
    """Relative error of an estimate of the learning coefficient, and whether it is within two standard errors.

    Args:
        answer: Tuple of the estimate and its standard error.
    Raises:
        ValueError: If the answer is no such pair, or the error is negative.
    """
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ValueError(
            f"learning_coefficient must be a tuple (estimate, standard error), got {answer!r}."
        )
    estimate, sem = as_numbers("learning_coefficient", answer).tolist()
    if sem < 0:
        raise ValueError(f"the standard error of learning_coefficient must be >= 0, got {sem}.")
    known = entry.truth.learning_coefficient
    if known is None:
        return {}
    error = estimate - known.value
    within = float(abs(error) <= 2 * sem)
    return {"coefficient error": error / known.value, "coefficient within 2 sem": within}


def score_algorithm(entry: Entry, label: str) -> dict[str, float]:
    """1 for a right label and 1 for a wrong one, in "label right" and "label wrong"; "undetermined" is neither."""
    known = entry.truth.algorithm
    if known is None:
        return {}
    right = label == known.value
    return {"label right": float(right), "label wrong": float(not right and label != NO_LABEL)}


def score_components(
    entry: Entry, directions: Float[np.ndarray, "direction d_model"]
) -> dict[str, float]:
    """Mean absolute cosine of the components with the directions of the best matching; a component without a direction
    counts 0.

    Raises:
        ValueError: If the directions are not finite vectors of the stream.
    """
    known = entry.truth.components
    if known is None:
        return {}
    from scipy.optimize import linear_sum_assignment  # slow import

    directions, width = as_numbers("components", directions), known.value.shape[1]
    if directions.ndim != 2 or directions.shape[1] != width or not np.isfinite(directions).all():
        shape = list(directions.shape)
        raise ValueError(
            f"components must be finite vectors of {width} numbers, got an array {shape}."
        )
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    cosines = np.abs(known.value @ (directions / np.where(lengths > 0, lengths, 1)).T)
    chosen = linear_sum_assignment(cosines, maximize=True)
    return {"components cosine": float(cosines[chosen].sum() / len(known.value))}


SCORED: dict[str, Callable[[Entry, Any], dict[str, float]]] = {
    "edges": score_edges,
    "heads": score_heads,
    "learning_coefficient": score_learning_coefficient,
    "label": score_algorithm,
    "components": score_components,
}
"""Function that scores each part of a method's answer in version 1."""
SCORED_2 = SCORED | {
    "edges": score_edges_of_all,
    "heads": score_heads_of_all,
    "circuits": score_circuits,
    "subspace": score_subspaces,
}
"""Function that scores each part of a method's answer in version 2."""


def _agreement(name: str, values: np.ndarray, effects: np.ndarray) -> dict[str, float]:
    """Rank correlations of absolute values and effects, and AUROC for the effects that matter; a score without an answer,
    such as AUROC if all matter, is left out."""
    from scipy.stats import kendalltau, spearmanr  # slow import

    values, truth = (
        np.where(size < NO_EFFECT * size.max(), 0, size)
        for size in (np.abs(values), np.abs(effects))
    )
    if np.ptp(truth) == 0:
        return {}
    said = np.ptp(values) > 0
    found = {
        f"{name} spearman": float(spearmanr(values, truth).statistic) if said else 0.0,
        f"{name} kendall": float(kendalltau(values, truth).statistic) if said else 0.0,
    }
    matters = truth > MATTERS * truth.max()
    if not matters.all():
        found[f"{name} auroc"] = auroc(matters, values)
    return found
