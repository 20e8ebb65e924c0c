"""Tables of the page on edges: agreement of each method with the patches, and faithfulness of its circuits."""

from pathlib import Path

import pandas as pd

ORDER = (
    *("patches", "attribution patching", "integrated gradients, 5", "integrated gradients, 20"),
    *("zero ablation", "random"),
)


def by_method(results: Path, column: str) -> str:
    """One row per model, one column per method: mean over sets of prompts and its standard error."""
    found = pd.read_csv(results / "edges_methods.csv")
    grouped = found.groupby(["model", "method"], sort=False)[column]
    mean, sem = grouped.mean().unstack(), grouped.sem().unstack()
    lines = [f"| model | edges | {' | '.join(ORDER)} |", "| --- |" + " --- |" * (len(ORDER) + 1)]
    edges = found.groupby("model")["edges"].first()
    for model in found["model"].unique():
        cells = [_cell(mean.loc[model, each], sem.loc[model, each]) for each in ORDER]
        lines.append(f"| {model} | {edges[model]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spearman(results: Path) -> str:
    """Rank correlation of each method's scores with the absolute effects of single edges."""
    return by_method(results, "spearman")


def auroc(results: Path) -> str:
    """AUROC for edges above 1% of the largest effect."""
    return by_method(results, "auroc")


def cmd(results: Path) -> str:
    """Area between the faithfulness of the circuits and 1."""
    return by_method(results, "cmd")


def cmd_differences(results: Path) -> str:
    """CMD of one method minus that of another on the same prompts: mean over sets of prompts and its standard error."""
    found = pd.read_csv(results / "edges_methods.csv")
    cmds = found.pivot(index=["model", "seed"], columns="method", values="cmd")
    _, attribution, five, twenty = ORDER[:4]
    pairs = ((five, attribution), ("patches", attribution), (twenty, five))
    lines = [f"| model | {' | '.join(f'{a} − {b}' for a, b in pairs)} |", "| --- |" + " --- |" * 3]
    for model in found["model"].unique():
        moved = [cmds.loc[model, a] - cmds.loc[model, b] for a, b in pairs]
        lines.append(f"| {model} | {' | '.join(_cell(d.mean(), d.sem()) for d in moved)} |")
    return "\n".join(lines)


def _cell(mean: float, sem: float) -> str:
    if pd.isna(mean):
        return "–"
    return f"{mean:.2f} ± {sem:.1g}" if abs(mean) < 10 else f"{mean:.0f} ± {sem:.0f}"
