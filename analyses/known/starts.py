"""Distributed alignment from several starts, on the entries where one start finds a part of a variable.

Run: python -m analyses known/starts (three minutes)"""

from itertools import product

import pandas as pd

from analyses.known.alignment import alignment
from analyses.known.methods import VERSION
from analyses.lib import Measured
from mechinterp.known import suite
from mechinterp.known.agreement import score_subspaces

NAMES = ("preprocess-1", "preprocess-2")
SEEDS = range(4)


def measure(quick: bool) -> Measured:
    known, rows = suite(VERSION, trained="none"), []
    for name, seed in product(NAMES[: 1 if quick else None], SEEDS[: 1 if quick else None]):
        bases = alignment(known[name].without_truth, seed=seed)["subspace"]
        found = score_subspaces(known[name], bases)
        scores = {key.removeprefix("subspace "): value for key, value in found.items()}
        rows.append({"entry": name, "seed": seed, **scores})
        print(rows[-1], flush=True)
    return Measured(pd.DataFrame(rows))
