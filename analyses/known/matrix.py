"""Mean scores of all methods on version 2 of the suite: the numbers of the page on methods on known answers.

The scores come from the submissions. A family is a model with its variants and seeds; means of scores and their standard
errors are over families, so that a model with many variants counts once.
Run: python -m analyses known/matrix (seconds)"""

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pandas as pd

from analyses.known.methods import SUBMISSIONS, VERSION
from analyses.lib import Measured
from mechinterp.known import read_submission, suite

BY_GRADIENTS = (
    *("attribution patching, in", "attribution patching, out", "integrated gradients"),
    *("EAP-IG inputs", "EAP-IG activations"),
)
PAIRS = (*combinations(BY_GRADIENTS, 2), ("attribution patching, out", "zero masking"))
"""Pairs of methods whose difference is taken on the same entries."""
RANDOM = re.compile(r"random \d+")
VARIANT = re.compile(r"(-rotated|-dead-heads|-noise-[\d.]+|-s\d+)+$")
"""Ending of the names of variants and seeds of one model, which form a family."""
FEWEST = 2
"""Smallest number of families for a standard error."""
GROUPS = {
    "deep": "trained, several layers",
    "one": "trained, one layer",
    "made": "hand-made",
}
"""Groups of entries with their titles; for a head of one layer without a norm, effects patched out are second-order exactly."""
EVERY = "all"
"""Group of all entries."""
CMD = "edges cmd"
"""Score whose best value is 0."""
LABEL, ALIGNMENT = "label of this package", "distributed alignment"
OUTCOMES = ("right", "undetermined", "wrong")
ABOUT = ["method", "entry", "kind", "family", "group", "seconds"]
"""Columns that are no score."""
Row = dict[str, Any]


def measure(quick: bool) -> Measured:
    found = all_scores()
    rows = [*means(found), *differences(found), *subspaces(found), *labels(found), *times(found)]
    return Measured(pd.DataFrame(rows))


def all_scores() -> pd.DataFrame:
    """Scores in all submissions, mean over the random orders: one row per method and entry."""
    frames = []
    for file in sorted(SUBMISSIONS.glob("*.json")):
        read = read_submission(file)
        wide = read.to_frame().pivot(index=["entry", "kind"], columns="score", values="value")
        wide = wide.reset_index()
        name = RANDOM.sub("random", read.method)
        frames.append(wide.assign(method=name, seconds=wide["entry"].map(read.seconds)))
    rows = pd.concat(frames, ignore_index=True)
    numbers = rows.columns.difference(["method", "entry", "kind"])
    found = rows.groupby(["method", "entry", "kind"], sort=False)[list(numbers)].mean()
    found = found.reset_index()
    return found.assign(
        family=found["entry"].str.replace(VARIANT, "", regex=True),
        group=found["entry"].map(groups()),
    )


def groups() -> dict[str, str]:
    """Group of each entry: one of GROUPS."""
    known = suite(VERSION, trained="all")
    layers = {name: len(entry.truth.heads_in.value) for name, entry in known.items()}
    return {
        name: "made" if entry.kind != "trained" else "deep" if layers[name] > 1 else "one"
        for name, entry in known.items()
    }


def means(found: pd.DataFrame) -> Iterator[Row]:
    """Mean of each score of each method over the families of a group, and the median over its entries."""
    scores = [name for name in found if name not in ABOUT]
    for group in (*GROUPS, EVERY):
        chosen = found if group == EVERY else found[found["group"] == group]
        for method, own in chosen.groupby("method", sort=False):
            for score in scores:
                values = own[score].dropna()
                if len(values):
                    row = {"part": "mean", "group": group, "score": score, "method": method}
                    yield row | over_families(values, own["family"]) | {"median": values.median()}


def over_families(values: pd.Series, families: pd.Series) -> Row:
    """Mean over families, its standard error, and the numbers of families and entries."""
    each = values.groupby(families).mean()
    counts = {"families": len(each), "entries": len(values)}
    return {"mean": each.mean(), "sem": each.sem() if len(each) >= FEWEST else None} | counts


def differences(found: pd.DataFrame) -> Iterator[Row]:
    """Mean difference of two methods on the same trained models of several layers, and how often the first is better."""
    deep = found[found["group"] == "deep"]
    for score in [name for name in found if str(name).endswith("spearman") or name == CMD]:
        wide = deep.pivot(index=["entry", "family"], columns="method", values=score)
        sign = -1 if score == CMD else 1
        for first, second in PAIRS:
            moved = (wide[first] - wide[second]).dropna().reset_index(name="moved")
            if len(moved):
                row = {"part": "difference", "group": "deep", "score": score, "method": first}
                counts = {"better": int((sign * moved["moved"] > 0).sum())}
                counts["tied"] = int((moved["moved"] == 0).sum())
                over = over_families(moved["moved"], moved["family"])
                yield row | {"second": second} | over | counts


def subspaces(found: pd.DataFrame) -> Iterator[Row]:
    """Scores of the subspaces of distributed alignment: mean over the entries of a kind, and R² of each entry."""
    rows = found[found["method"] == ALIGNMENT]
    kinds = rows["entry"].str.extract(r"-(noise-[\d.]+)$")[0].fillna(rows["kind"])
    kinds = kinds.mask(rows["subspace control"].notna(), "random weights")
    for kind, part in rows.groupby(kinds, sort=False):
        for name in ("interchange", "cosine", "control"):
            values = part[f"subspace {name}"].dropna()
            row = {"part": "subspace", "group": kind, "score": name, "method": ALIGNMENT}
            yield row | {"mean": values.mean(), "sem": values.sem(), "entries": len(part)}
    for entry, value in rows.set_index("entry")["subspace interchange"].dropna().items():
        row = {"part": "subspace of an entry", "group": entry, "score": "interchange"}
        yield row | {"method": ALIGNMENT, "mean": value}


def labels(found: pd.DataFrame) -> Iterator[Row]:
    """Number of labels of this package on the hand-made models that are right, undetermined or wrong, by variant."""
    rows = found[found["method"] == LABEL].dropna(subset=["label right"])
    variants = rows["entry"].str.extract(r"(rotated|dead-heads|noise-[\d.]+)$")[0].fillna("plain")
    for variant, part in rows.groupby(variants, sort=False):
        right, wrong = part["label right"].sum(), part["label wrong"].sum()
        totals = (right, len(part) - right - wrong, wrong)
        for outcome, total in zip(OUTCOMES, totals, strict=True):
            row = {"part": "label", "group": variant, "score": outcome, "method": LABEL}
            yield row | {"total": total, "entries": len(part)}


def times(found: pd.DataFrame) -> Iterator[Row]:
    """Processor time of each method, all entries together."""
    for method, part in found.groupby("method", sort=False):
        row = {"part": "time", "group": EVERY, "score": "seconds", "method": method}
        yield row | {"total": part["seconds"].sum(), "entries": len(part)}
