"""C10 to C12 of sparse regression: the numbers that they are judged by, one rule for all models.

A few prompts carry the mean risk of linear attention with a head masked that it needs. So heads at
work are those of median rises, and what pruning costs is told with a new read-out, or by medians.
The share of the best head is one of mean rises: the tables of models that are not shipped keep no
other. Thresholds are ours, set before anything was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analyses.lib.records import RELATIONS


@dataclass(frozen=True)
class Clause:
    """One number of a claim and what it must be."""

    statement: str
    quantity: str
    relation: str
    bound: float


AS_IS = "median risk over the full model's"
REFIT = "risk over the full model's"
CLAUSES = {
    "C10-several": Clause(
        "layer 1 uses several heads", "effective heads by medians", "at least", 2
    ),
    "C10-later": Clause(
        "and more than any later layer",
        "effective heads over the most of a later layer, by medians",
        "at least",
        1.5,
    ),
    "C10-top-first": Clause("no head dominates layer 1", "share of its best head", "at most", 0.6),
    "C10-top-later": Clause(
        "one dominates later layers",
        "share of the best head, median over later layers",
        "at least",
        0.7,
    ),
    "C11-refit": Clause(
        "one head in each later layer will do, with a new read-out", REFIT, "at most", 1.25
    ),
    "C11-as-is": Clause("one head in each later layer will do, as it is", AS_IS, "at most", 2),
    "C12-refit": Clause("one head in layer 1 will not, with a new read-out", REFIT, "at least", 2),
    "C12-beside-refit": Clause(
        "and costs more than one in each later layer, with a new read-out",
        "ratio of C12 over that of C11",
        "at least",
        1.5,
    ),
}
"""By the id of the record."""


@dataclass(frozen=True)
class Numbers:
    """What was measured of a model."""

    effective: Sequence[float]
    """Effective heads of each layer, by median rises."""
    shares: Sequence[float]
    """Share of the head of each layer that was the best on other prompts."""
    later: float
    """Risk over the whole model's with one head in each later layer and a new read-out."""
    later_median: float
    """Median risk over the whole model's with one head in each later layer, as it is."""
    first: float
    """Risk over the whole model's with one head in layer 1 and a new read-out."""

    def by_clause(self) -> dict[str, float]:
        return {
            "C10-several": self.effective[0],
            "C10-later": self.effective[0] / max(self.effective[1:]),
            "C10-top-first": self.shares[0],
            "C10-top-later": float(np.median(self.shares[1:])),
            "C11-refit": self.later,
            "C11-as-is": self.later_median,
            "C12-refit": self.first,
            "C12-beside-refit": self.first / self.later,
        }


def verdicts(found: Numbers) -> dict[str, bool]:
    """C10 to C12: a claim holds where all of its clauses do."""
    values = found.by_clause()
    held = {
        name: bool(RELATIONS[clause.relation](values[name], clause.bound))
        for name, clause in CLAUSES.items()
    }
    return {
        claim: all(holds for name, holds in held.items() if name.startswith(claim))
        for claim in ("C10", "C11", "C12")
    }


def of_row(row: Mapping[str, object]) -> dict[str, bool]:
    """C10 to C12 of a row of results/sparse_settings.csv, and C11 with a pair in place of one head."""
    layers = range(1, int(row["n_layers"]) + 1)
    effective = [float(row[f"n_eff_{layer}_median"]) for layer in layers]
    shares = [float(row[f"top_share_{layer}"]) for layer in layers]
    one, pair = (
        verdicts(
            Numbers(
                effective,
                shares,
                later=float(row[f"{name}_refit"]),
                later_median=float(row[f"{name}_median"]),
                first=float(row["first_refit"]),
            )
        )
        for name in ("later", "pairs")
    )
    return one | {"C11_pairs": pair["C11"]}
