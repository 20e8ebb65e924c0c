"""Contents of version 2 of the suite: one row per entry, for the counts of its pages.

Run: python -m analyses known/contents (seconds)"""

import numpy as np
import pandas as pd

from analyses.known.matrix import VARIANT, groups
from analyses.known.methods import VERSION
from analyses.lib import Measured
from mechinterp.known import suite
from mechinterp.known.truth import MOST_SUBSETS, Truth


def measure(quick: bool) -> Measured:
    every, wheel, first = suite(VERSION, trained="all"), suite(VERSION), suite(1, trained="all")
    group_of, rows = groups(), []
    for name, entry in every.items():
        truth = entry.truth
        rows.append(
            {
                "entry": name,
                "kind": entry.kind,
                "group": group_of[name],
                "family": VARIANT.sub("", name),
                "first": name in first,
                "wheel": name in wheel,
                "layers": truth.heads_in.value.shape[0],
                "heads": truth.heads_in.value.size,
                "edges": len(truth.edges_in.value),
                "subsets": truth.heads_in.value.size <= MOST_SUBSETS,
                "variables": len(entry.variables),
                "algorithm": "" if truth.algorithm is None else truth.algorithm.value,
                "coefficient": None
                if truth.learning_coefficient is None
                else truth.learning_coefficient.value,
                "disagreement": disagreement(truth),
            }
        )
    frame = pd.DataFrame(rows)
    # Models of a family with the same settings, which differ in their seeds.
    return Measured(
        frame.assign(seeds=frame.groupby(["kind", "family"])["entry"].transform("size"))
    )


def disagreement(truth: Truth) -> float:
    """Largest difference between both programs, over the largest effect of the entry; effects of one kind may all be 0."""
    computed = [each for each in vars(truth).values() if each and each.how == "computed exactly"]
    largest = max(np.abs(each.value).max() for each in computed)
    return max(each.error for each in computed) / largest
