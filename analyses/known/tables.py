"""Tables of the page on methods on known answers."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from analyses.known.devinterp_sampler import SETTINGS
from analyses.known.methods import SUBMISSIONS, VERSION
from analyses.known.samplers import SAMPLERS
from mechinterp.known import read_submission, suite
from mechinterp.known.truth import KINDS

EXACT = tuple(f"exact, {kind}" for kind in KINDS)
BY_GRADIENTS = (
    *("attribution patching, in", "attribution patching, out", "integrated gradients"),
    *("EAP-IG inputs", "EAP-IG activations"),
)
BY_MASKS = (
    *("zero masking", "mean masking", "resample masking", "Shapley masking", "attention weight"),
)
PRUNING = "edge pruning"
"""Asked of models with many edges alone: all trained ones of several layers, and three others."""
OWN = (
    *(*EXACT, *BY_GRADIENTS, *BY_MASKS, PRUNING, "distributed alignment", "random"),
    *("label of this package", "singular vectors"),
)
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


@cache
def _found() -> pd.DataFrame:
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
    means = rows.groupby(["method", "entry", "kind"], sort=False)[list(numbers)].mean()
    means = means.reset_index()
    return means.assign(
        family=means["entry"].str.replace(VARIANT, "", regex=True),
        group=means["entry"].map(_groups()),
    )


def _groups() -> dict[str, str]:
    """Group of each entry: one of GROUPS."""
    known = suite(VERSION, trained="all")
    layers = {name: len(entry.truth.heads_in.value) for name, entry in known.items()}
    return {
        name: "made" if entry.kind != "trained" else "deep" if layers[name] > 1 else "one"
        for name, entry in known.items()
    }


def _others() -> tuple[str, ...]:
    """Methods of the submissions that are none of this page's own."""
    return tuple(sorted(set(_found()["method"]) - set(OWN)))


def _cell(values: pd.Series, families: pd.Series, *, sign: str = "") -> str:
    """Mean over families, its standard error over families, and their number."""
    means = values.dropna().groupby(families).mean()
    if means.empty:
        return "–"
    if len(means) < FEWEST:
        return f"{means.mean():{sign}.2f} (1)"
    return f"{means.mean():{sign}.2f} ± {means.sem():.2f} ({len(means)})"


def _matrix(rows: pd.DataFrame, methods: Sequence[str], scores: Mapping[str, str]) -> str:
    lines = [f"| Method | {' | '.join(scores.values())} |", "| --- |" + " --- |" * len(scores)]
    for method in methods:
        own = rows[rows["method"] == method]
        cells = [_cell(own[score], own["family"]) for score in scores]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _heads(group: str) -> str:
    found = _found()
    methods = (*EXACT, *BY_GRADIENTS, *BY_MASKS, *_others(), "random")
    scores = {f"heads {kind} spearman": kind for kind in KINDS}
    return _matrix(found[found["group"] == group], methods, scores)


def heads_deep(results: Path) -> str:
    """Rank correlation of each ranking of heads with each truth, trained models of several layers."""
    return _heads("deep")


def heads_one(results: Path) -> str:
    """Rank correlation of each ranking of heads with each truth, trained models of one layer."""
    return _heads("one")


def heads_made(results: Path) -> str:
    """Rank correlation of each ranking of heads with each truth, hand-made models."""
    return _heads("made")


def _edges(group: str) -> str:
    found = _found()
    pruned = (PRUNING,) if group == "deep" else ()
    methods = (*EXACT[:2], *BY_GRADIENTS, *pruned, *_others(), "random")
    scores = {
        "edges in spearman": "in, Spearman",
        "edges out spearman": "out, Spearman",
        "edges in auroc": "in, AUROC",
        "edges out auroc": "out, AUROC",
    }
    return _matrix(found[found["group"] == group], methods, scores)


def edges_deep(results: Path) -> str:
    """Agreement of each ranking of edges with each truth, trained models of several layers."""
    return _edges("deep")


def edges_one(results: Path) -> str:
    """Agreement of each ranking of edges with each truth, trained models of one layer."""
    return _edges("one")


def edges_made(results: Path) -> str:
    """Agreement of each ranking of edges with each truth, hand-made models."""
    return _edges("made")


def circuits(results: Path) -> str:
    """Circuits: heads against the best of each size, and CMD of edges as the median over entries."""
    found = _found()
    methods = (*EXACT, *BY_GRADIENTS, *BY_MASKS, PRUNING, *_others(), "random")
    scores = {"circuits in": "heads, in", "circuits out": "heads, out"}
    lines = _matrix(found, methods, scores).split("\n")
    more = []
    for group, title in GROUPS.items():
        column = [f" edges, median CMD, {title} |", " --- |"]
        for method in methods:
            at = (found["method"] == method) & (found["group"] == group)
            values = found.loc[at, "edges cmd"].dropna()
            column.append(f" {values.median():.2f} ({len(values)}) |" if len(values) else " – |")
        more.append(column)
    return "\n".join(map("".join, zip(lines, *more, strict=True)))


def shapley(results: Path) -> str:
    """Rank correlation of each ranking of heads with the Shapley values under each mask."""
    scores = {f"shapley {kind} spearman": kind for kind in KINDS}
    return _matrix(_found(), (*EXACT, *BY_GRADIENTS, *BY_MASKS, *_others(), "random"), scores)


PAIRS = (
    ("attribution patching, in", "EAP-IG inputs"),
    ("attribution patching, out", "EAP-IG inputs"),
    ("attribution patching, in", "attribution patching, out"),
    ("EAP-IG inputs", "EAP-IG activations"),
    ("attribution patching, out", "zero masking"),
)
PAIRED = (
    *("edges in spearman", "edges out spearman", "heads in spearman", "heads out spearman"),
    "heads zero spearman",
)


def pairs(results: Path) -> str:
    """Two methods on the same trained models of several layers: mean difference over families, and how often the first is
    better."""
    found = _found()
    trained = found[found["group"] == "deep"]
    lines = ["| Score | First − second | Difference | First better |", "| --- |" + " --- |" * 3]
    for score in PAIRED:
        wide = trained.pivot(index=["entry", "family"], columns="method", values=score)
        for first, second in PAIRS:
            moved = (wide[first] - wide[second]).dropna().reset_index(name="moved")
            if moved.empty:
                continue
            better, tied = (moved["moved"] > 0).sum(), (moved["moved"] == 0).sum()
            cell = _cell(moved["moved"], moved["family"], sign="+")
            lines.append(
                f"| {score} | {first} − {second} | {cell} | {better} of {len(moved)}, {tied} tied |"
            )
    return "\n".join(lines)


def subspaces(results: Path) -> str:
    """Subspaces of distributed alignment, by kind of model."""
    found = _found()
    rows = found[found["method"] == "distributed alignment"]
    kinds = rows["entry"].str.extract(r"-(noise-[\d.]+)$")[0].fillna(rows["kind"])
    kinds = kinds.mask(rows["subspace control"].notna(), "random weights")
    names = ("interchange", "cosine", "control")
    lines = ["| Models | Entries | Interchange R² | Squared cosine | Control R² |"]
    lines.append("| --- |" + " --- |" * 4)
    for kind, part in rows.groupby(kinds, sort=False):
        cells = [_plain(part[f"subspace {name}"]) for name in names]
        lines.append(f"| {kind} | {len(part)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _plain(values: pd.Series) -> str:
    values = values.dropna()
    if values.empty:
        return "–"
    return (
        f"{values.mean():.3f} ± {values.sem():.3f}" if len(values) > 1 else f"{values.mean():.3f}"
    )


def seconds(results: Path) -> str:
    """Processor time of each method, all entries together."""
    total = _found().groupby("method")["seconds"].sum()
    lines = ["| Method | Seconds |", "| --- | --- |"]
    methods = (*BY_GRADIENTS, *BY_MASKS, PRUNING, "distributed alignment")
    lines += [f"| {method} | {total[method]:.0f} |" for method in methods]
    return "\n".join(lines)


def labels(results: Path) -> str:
    """Labels of this package on the hand-made models, by variant."""
    found = _found()
    rows = found[found["method"] == "label of this package"].dropna(subset=["label right"])
    wide = rows.set_index("entry")
    variant = (
        wide.index.to_series().str.extract(r"(rotated|dead-heads|noise-[\d.]+)$")[0].fillna("plain")
    )
    lines = ["| Variant | Models | Right | Undetermined | Wrong |", "| --- |" + " --- |" * 4]
    for name, part in wide.groupby(variant, sort=False):
        right, wrong = part["label right"].sum(), part["label wrong"].sum()
        left = len(part) - right - wrong
        lines.append(f"| {name} | {len(part)} | {right:.0f} | {left:.0f} | {wrong:.0f} |")
    return "\n".join(lines)


def samplers(results: Path) -> str:
    """Relative bias, coverage and cost of each sampler over models and seeds."""
    costs = {name: c.n_chains * c.n_gradients for name, (_, c) in SAMPLERS.items()}
    return _samplers(pd.read_csv(results / "known_samplers.csv"), costs)


def _samplers(rows: pd.DataFrame, costs: Mapping[str, int]) -> str:
    """Table of samplers.

    Args:
        costs: Number of gradients of one estimate, over its chains, by sampler.
    """
    lines = [
        "| Sampler | Gradients | Estimates | Bias | Within 1 error | Within 2 errors |",
        "| --- |" + " --- |" * 5,
    ]
    for name, part in rows.groupby("method", sort=False):
        error = part["estimate"] - part["exact"]
        bias = error / part["exact"]
        within = [(error.abs() <= k * part["sem"]).mean() for k in (1, 2)]
        lines.append(
            f"| {name} | {costs[str(name)]:,} | {part['estimate'].count()} of {len(part)} | {bias.mean():+.1%} ± "
            f"{bias.sem():.1%} | {within[0]:.0%} | {within[1]:.0%} |"
        )
    return "\n".join(lines)


def devinterp(results: Path) -> str:
    """The table of samplers for devinterp, with the bias of both halves of a run and the one that theory predicts."""
    rows = pd.read_csv(results / "known_devinterp_sampler.csv")
    costs = {
        name: int(own["num_chains"] * (own["num_draws"] + own.get("num_burnin_steps", 0)))
        for name, own in SETTINGS.items()
    }
    lines = _samplers(rows, costs).split("\n")
    names = ["first_half", "second_half", "theory"]
    bias = rows[names].div(rows["exact"], axis=0) - 1
    columns = [" Halves of the run | Theory of this length |", " --- | --- |"]
    for first, second, theory in bias.groupby(rows["method"], sort=False).mean().to_numpy():
        halves = "–" if pd.isna(first) else f"{first:+.1%}, {second:+.1%}"
        columns.append(f" {halves} | {theory:+.1%} |")
    return "\n".join(line + cell for line, cell in zip(lines, columns, strict=True))
