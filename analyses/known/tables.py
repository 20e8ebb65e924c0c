"""Tables of the page on methods on known answers."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd

from analyses.known.devinterp_sampler import SETTINGS
from analyses.known.matrix import ALIGNMENT, BY_GRADIENTS, CMD, EVERY, GROUPS, LABEL, OUTCOMES
from analyses.known.samplers import SAMPLERS
from mechinterp.known.truth import KINDS

EXACT = tuple(f"exact, {kind}" for kind in KINDS)
BY_MASKS = (
    *("zero masking", "mean masking", "resample masking", "Shapley masking", "attention weight"),
)
PRUNING = "edge pruning"
"""Asked of models with many edges alone: all trained ones of several layers, and three others."""
OWN = (
    *(*EXACT, *BY_GRADIENTS, *BY_MASKS, PRUNING, ALIGNMENT, "random"),
    *(LABEL, "singular vectors"),
)
PAIRED = (
    *("edges in spearman", "edges out spearman", "edges cmd"),
    *("heads in spearman", "heads out spearman", "heads zero spearman"),
)
SHOWN = (
    ("attribution patching, in", "EAP-IG inputs"),
    ("attribution patching, out", "EAP-IG inputs"),
    ("attribution patching, in", "attribution patching, out"),
    ("EAP-IG inputs", "EAP-IG activations"),
    ("attribution patching, out", "zero masking"),
)
"""Pairs of methods in the table of differences."""


@cache
def _matrix_of(results: Path, part: str) -> pd.DataFrame:
    """Rows of a part of the results of known/matrix."""
    rows = pd.read_csv(results / "known_matrix.csv")
    return rows[rows["part"] == part]


def _others(results: Path) -> tuple[str, ...]:
    """Methods of the submissions that are none of this page's own."""
    return tuple(sorted(set(_matrix_of(results, "mean")["method"]) - set(OWN)))


def cell(rows: pd.DataFrame, *, sign: str = "") -> str:
    """Mean over families, its standard error and the number of families, of at most one row."""
    if rows.empty:
        return "–"
    (row,) = rows.itertuples()
    error = "" if pd.isna(row.sem) else f" ± {row.sem:.2f}"
    return f"{row.mean:{sign}.2f}{error} ({row.families:.0f})"


def _matrix(rows: pd.DataFrame, methods: Sequence[str], scores: Mapping[str, str]) -> str:
    lines = [f"| Method | {' | '.join(scores.values())} |", "| --- |" + " --- |" * len(scores)]
    for method in methods:
        own = rows[rows["method"] == method]
        cells = [cell(own[own["score"] == score]) for score in scores]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of_group(results: Path, group: str) -> pd.DataFrame:
    rows = _matrix_of(results, "mean")
    return rows[rows["group"] == group]


def _heads(results: Path, group: str) -> str:
    methods = (*EXACT, *BY_GRADIENTS, *BY_MASKS, *_others(results), "random")
    scores = {f"heads {kind} spearman": kind for kind in KINDS}
    return _matrix(_of_group(results, group), methods, scores)


def heads_deep(results: Path) -> str:
    """Rank correlation of each ranking of heads with each truth, trained models of several layers."""
    return _heads(results, "deep")


def heads_one(results: Path) -> str:
    """Rank correlation of each ranking of heads with each truth, trained models of one layer."""
    return _heads(results, "one")


def heads_made(results: Path) -> str:
    """Rank correlation of each ranking of heads with each truth, hand-made models."""
    return _heads(results, "made")


def _edges(results: Path, group: str) -> str:
    pruned = (PRUNING,) if group == "deep" else ()
    methods = (*EXACT[:2], *BY_GRADIENTS, *pruned, *_others(results), "random")
    scores = {
        "edges in spearman": "in, Spearman",
        "edges out spearman": "out, Spearman",
        "edges in auroc": "in, AUROC",
        "edges out auroc": "out, AUROC",
    }
    return _matrix(_of_group(results, group), methods, scores)


def edges_deep(results: Path) -> str:
    """Agreement of each ranking of edges with each truth, trained models of several layers."""
    return _edges(results, "deep")


def edges_one(results: Path) -> str:
    """Agreement of each ranking of edges with each truth, trained models of one layer."""
    return _edges(results, "one")


def edges_made(results: Path) -> str:
    """Agreement of each ranking of edges with each truth, hand-made models."""
    return _edges(results, "made")


def circuits(results: Path) -> str:
    """Circuits: heads against the best of each size, and CMD of edges as the median over entries."""
    methods = (*EXACT, *BY_GRADIENTS, *BY_MASKS, PRUNING, *_others(results), "random")
    scores = {"circuits in": "heads, in", "circuits out": "heads, out"}
    lines = _matrix(_of_group(results, EVERY), methods, scores).split("\n")
    more = []
    for group, title in GROUPS.items():
        rows = _of_group(results, group)
        medians = rows[rows["score"] == "edges cmd"].set_index("method")
        column = [f" edges, median CMD, {title} |", " --- |"]
        for method in methods:
            known = method in medians.index
            row = medians.loc[method] if known else None
            column.append(
                " – |" if row is None else f" {row['median']:.2f} ({row['entries']:.0f}) |"
            )
        more.append(column)
    return "\n".join(map("".join, zip(lines, *more, strict=True)))


def shapley(results: Path) -> str:
    """Rank correlation of each ranking of heads with the Shapley values under each mask."""
    scores = {f"shapley {kind} spearman": kind for kind in KINDS}
    methods = (*EXACT, *BY_GRADIENTS, *BY_MASKS, *_others(results), "random")
    return _matrix(_of_group(results, EVERY), methods, scores)


def pairs(results: Path) -> str:
    """Two methods on the same trained models of several layers: mean difference over families, and how often the first is
    better."""
    rows = _matrix_of(results, "difference")
    lines = ["| Score | First − second | Difference | First better |", "| --- |" + " --- |" * 3]
    for score, (first, second) in product(PAIRED, SHOWN):
        chosen = rows[
            (rows["score"] == score) & (rows["method"] == first) & (rows["second"] == second)
        ]
        for row in chosen.itertuples():
            better = f"{row.better:.0f} of {row.entries:.0f}, {row.tied:.0f} tied"
            # Few models with a large CMD decide its mean.
            moved = "–" if score == CMD else cell(chosen, sign="+")
            lines.append(f"| {score} | {first} − {second} | {moved} | {better} |")
    return "\n".join(lines)


def subspaces(results: Path) -> str:
    """Subspaces of distributed alignment, by kind of model."""
    rows = _matrix_of(results, "subspace")
    lines = ["| Models | Entries | Interchange R² | Squared cosine | Control R² |"]
    lines.append("| --- |" + " --- |" * 4)
    for kind, part in rows.groupby("group", sort=False):
        of = part.set_index("score")
        cells = [_plain(of.loc[name]) for name in ("interchange", "cosine", "control")]
        lines.append(f"| {kind} | {part['entries'].iloc[0]:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _plain(row: pd.Series) -> str:
    if pd.isna(row["mean"]):
        return "–"
    return f"{row['mean']:.3f}" + ("" if pd.isna(row["sem"]) else f" ± {row['sem']:.3f}")


def seconds(results: Path) -> str:
    """Processor time of each method, all entries together."""
    total = _matrix_of(results, "time").set_index("method")["total"]
    methods = (*BY_GRADIENTS, *BY_MASKS, PRUNING, ALIGNMENT)
    rows = [f"| {method} | {total[method]:.0f} |" for method in methods]
    return "\n".join(["| Method | Seconds |", "| --- | --- |", *rows])


def labels(results: Path) -> str:
    """Labels of this package on the hand-made models, by variant."""
    rows = _matrix_of(results, "label")
    lines = ["| Variant | Models | Right | Undetermined | Wrong |", "| --- |" + " --- |" * 4]
    for variant, part in rows.groupby("group", sort=False):
        total = part.set_index("score")["total"]
        cells = " | ".join(f"{total[outcome]:.0f}" for outcome in OUTCOMES)
        lines.append(f"| {variant} | {part['entries'].iloc[0]:.0f} | {cells} |")
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


def precision(results: Path) -> str:
    """Learning coefficient of each entry by draws in float64 and in float32: mean over seeds and its standard error."""
    rows = pd.read_csv(results / "known_precision.csv")
    rows = rows[rows["part"] == "estimate"]
    lines = ["| Entry | Exact | float64 | float32 |", "| --- |" + " --- |" * 3]
    for name, part in rows.groupby("model", sort=False):
        cells = [f"{part[p].mean():.3f} ± {part[p].sem():.3f}" for p in ("float64", "float32")]
        lines.append(f"| {name} | {part['exact'].iloc[0]:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gradients(results: Path) -> str:
    """Processor time of a gradient on prompts, in seconds."""
    rows = pd.read_csv(results / "known_precision.csv")
    lines = ["| Model | Through hooks, float64 | Of training, float64 | Of training, float32 |"]
    lines.append("| --- |" + " --- |" * 3)
    for row in rows[rows["part"] == "gradient"].itertuples():
        times = (row.hooks, row.float64, row.float32)
        lines.append(f"| {row.model} | {' | '.join(f'{each:.2f} s' for each in times)} |")
    return "\n".join(lines)
