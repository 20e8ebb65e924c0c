"""Tables of the page on methods on known answers."""

from pathlib import Path

import pandas as pd

RANKINGS = (
    *("effects", "attribution patching", "integrated gradients, 5", "integrated gradients, 20"),
    *("zero ablation", "mean ablation", "attention weight", "random"),
)
KINDS = ("hand-made", "trained")


def _found(results: Path) -> pd.DataFrame:
    return pd.read_csv(results / "known_methods.csv")


def _cell(values: pd.Series) -> str:
    """Mean over entries, its standard error and their number."""
    values = values.dropna()
    if values.empty:
        return "–"
    return f"{values.mean():.2f} ± {values.sem():.2f} ({len(values)})"


def _by_method(results: Path, scores: dict[str, str], *, kinds: tuple[str, ...]) -> str:
    found = _found(results)
    heads = [f"{title}, {kind}" for title in scores.values() for kind in kinds]
    lines = [f"| Method | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    # One number per entry: a random order has several.
    means = (
        found.groupby(["method", "kind", "score", "entry"], sort=False)["value"].mean().sort_index()
    )
    for method in RANKINGS:
        cells = [
            _cell(means.get((method, kind, score), pd.Series(dtype=float)))
            for score in scores
            for kind in kinds
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def edges(results: Path) -> str:
    """Agreement of each ranking of edges with the effects of single edges: mean over entries (number of entries)."""
    return _by_method(results, {"edges spearman": "Spearman", "edges auroc": "AUROC"}, kinds=KINDS)


def heads(results: Path) -> str:
    """Agreement of each ranking of heads with the effects of single heads: mean over entries (number of entries)."""
    return _by_method(results, {"heads spearman": "Spearman", "heads auroc": "AUROC"}, kinds=KINDS)


def shapley(results: Path) -> str:
    """Agreement of each ranking of heads with their Shapley values, over all models of one layer."""
    scores = {"shapley spearman": "Spearman"}
    return _by_method(results, scores, kinds=("hand-made", "minimum", "trained"))


def circuits(results: Path) -> str:
    """CMD of the circuits of the first edges: median over entries, and in how many the method has the least of all."""
    found = _found(results)
    cmds = (
        found[found["score"] == "edges cmd"]
        .groupby(["kind", "entry", "method"])["value"]
        .mean()
        .unstack()
    )
    lines = [
        "| Method | Median, hand-made | Median, trained | Least, trained |",
        "| --- |" + " --- |" * 3,
    ]
    trained = cmds.loc["trained"]
    best = trained[[m for m in RANKINGS if m != "effects"]].idxmin(axis=1)
    for method in RANKINGS:
        least = "" if method == "effects" else f"{(best == method).sum()} of {len(trained)}"
        medians = [f"{cmds.loc[kind][method].median():.2f}" for kind in KINDS]
        lines.append(f"| {method} | {medians[0]} | {medians[1]} | {least} |")
    return "\n".join(lines)


def pairs(results: Path) -> str:
    """Two methods on the same entries: mean difference with its standard error, and how often the first is better."""
    found = _found(results)
    pivot = found.groupby(["score", "entry", "method"])["value"].mean().unstack()
    lines = ["| Score | First − second | Difference | First better |", "| --- |" + " --- |" * 3]
    for score in ("edges spearman", "edges auroc", "edges cmd", "heads spearman", "heads auroc"):
        rows = pivot.loc[score]
        for other in ("integrated gradients, 5", "zero ablation"):
            moved = (rows["attribution patching"] - rows[other]).dropna()
            better = (moved < 0).sum() if score == "edges cmd" else (moved > 0).sum()
            shown = (
                f"median {moved.median():+.2f}"
                if score == "edges cmd"
                else f"{moved.mean():+.2f} ± {moved.sem():.2f}"
            )
            tied = (moved == 0).sum()
            lines.append(
                f"| {score} | attribution patching − {other} | {shown} | {better} of {len(moved)}, {tied} tied |"
            )
    return "\n".join(lines)


def seconds(results: Path) -> str:
    """Processor time of each method, all entries together."""
    found = _found(results).drop_duplicates(["method", "entry"])
    total = found.groupby("method")["seconds"].sum()
    lines = ["| Method | Seconds |", "| --- | --- |"]
    lines += [f"| {method} | {total[method]:.0f} |" for method in RANKINGS[1:-1]]
    return "\n".join(lines)


def labels(results: Path) -> str:
    """Labels of this package on the hand-made models, by variant."""
    found = _found(results)
    rows = found[found["method"] == "label of this package"]
    wide = rows.pivot(index="entry", columns="score", values="value")
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
    """Relative bias and coverage of each sampler over models and seeds."""
    return _samplers(pd.read_csv(results / "known_samplers.csv"))


def _samplers(rows: pd.DataFrame) -> str:
    lines = [
        "| Sampler | Estimates | Bias | Within 1 error | Within 2 errors |",
        "| --- |" + " --- |" * 4,
    ]
    for name, part in rows.groupby("method", sort=False):
        error = part["estimate"] - part["exact"]
        bias = error / part["exact"]
        within = [(error.abs() <= k * part["sem"]).mean() for k in (1, 2)]
        lines.append(
            f"| {name} | {part['estimate'].count()} of {len(part)} | {bias.mean():+.1%} ± {bias.sem():.1%} | "
            f"{within[0]:.0%} | {within[1]:.0%} |"
        )
    return "\n".join(lines)


def devinterp(results: Path) -> str:
    """The table of samplers for devinterp, with the bias of both halves of a run and the one that theory predicts."""
    rows = pd.read_csv(results / "known_devinterp_sampler.csv")
    lines = _samplers(rows).split("\n")
    names = ["first_half", "second_half", "theory"]
    bias = rows[names].div(rows["exact"], axis=0) - 1
    columns = [" Halves of the run | Theory of this length |", " --- | --- |"]
    for first, second, theory in bias.groupby(rows["method"], sort=False).mean().to_numpy():
        halves = "–" if pd.isna(first) else f"{first:+.1%}, {second:+.1%}"
        columns.append(f" {halves} | {theory:+.1%} |")
    return "\n".join(line + cell for line, cell in zip(lines, columns, strict=True))
