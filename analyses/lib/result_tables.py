"""Tables of pages made from the CSV files of results: shipped models, emergence and calibration.

`lib/pages.py` writes them; a fast test compares them with the files."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from scipy.stats import binomtest

from analyses.lib.records import span

Row = tuple[str, ...]
Cell = str | list[str]
"""Format of a cell, such as "{0.loss:.2f}"; or a column of booleans and the formats for True and
for False."""


def markdown(header: Row, rows: list[Row]) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header)]
    lines += [tuple(cell.replace("|", "\\|") for cell in cells) for cells in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def table(found: pd.DataFrame, columns: Mapping[str, Cell]) -> str:
    """A Markdown table with one line per row of a frame; columns by their headers.

    Example:
        >>> table(pd.DataFrame({"x": [0.125], "odd": [False]}), {"x": "{0.x:.2f}", "is": ["odd", "odd", "even"]})
        '| x | is |\\n| --- | --- |\\n| 0.12 | even |'
    """
    return markdown(
        tuple(columns),
        [tuple(cell(one, row) for one in columns.values()) for row in found.itertuples()],
    )


def cell(how: Cell, row: tuple) -> str:
    """Text of one cell."""
    if isinstance(how, str):
        return how.format(row)
    decides, yes, no = how
    return (yes if getattr(row, decides) else no).format(row)


def from_csv(results: Path, csv: str, columns: Mapping[str, Cell], where: str = "") -> str:
    """A table of the rows of a CSV file that satisfy `where`."""
    rows = pd.read_csv(results / f"{csv}.csv")
    return table(rows.query(where) if where else rows, columns)


def shipped(results: Path) -> str:
    """Softmax models in the paper's setting, by number of heads and pattern."""
    found = pd.read_csv(results / "softmax_shipped_models.csv")
    found["heads"] = found.model.str.extract(r"-h(\d+)-")[0].astype(int)
    found["mu"] = found[["positive_mu", "negative_mu"]].abs().max(axis=1)
    count, rows = found.groupby("heads").size(), []
    for (heads, pattern), one in found.groupby(["heads", "pattern"]):
        seeds = f"{len(one)} of {count[heads]}" if len(one) < count[heads] else f"{len(one)}"
        zero_sum = "" if pattern == "kernel_regression" else span(one.zero_sum, ".3f")
        scales = (span(one.omega, ".3f"), span(one.mu, ".2f"), zero_sum, span(one.eta, ".3f"))
        loss = f"{one.loss.mean():.4f} ± {one.loss_sem.max():.4f}"
        rows.append((f"{heads}", seeds, pattern, *scales, loss))
    header = ("heads", "seeds", "pattern", "\\|omega\\|", "mu of one sign")
    header += ("\\|Σ mu\\| / Σ \\|mu\\|", "Σ mu·omega", "loss at L = 40")
    return markdown(header, rows)


ARMS = {
    "adam": "Adam, as the paper",
    "small init": "Adam, a tenth of the initial weights",
    "sgd": "plain SGD, rate 0.1",
    "stuck": "Adam, 16 models of one sign trained further",
}


def emergence(results: Path) -> str:
    """Number of seeds that end in each outcome, by training and number of heads."""
    last = pd.read_csv(results / "softmax_emergence.csv")
    last = last.groupby(["arm", "n_heads", "what"], sort=False).last()
    rows = []
    for arm, text in ARMS.items():
        for heads in last.loc[arm].index.unique("n_heads"):
            one = last.loc[arm, heads]
            sign = one.loc["one sign"]
            interval = f"({100 * sign.low:.1f} to {100 * sign.high:.1f})"
            shares = [f"{one.loc[what].fraction:.1%}" for what in ("debiased_gd", "a dummy head")]
            cells = (text, f"{heads}", f"{int(sign.step):,}", f"{int(sign.seeds)}")
            rows.append((*cells, f"{sign.fraction:.1%} {interval}", *shares))
    header = ("training", "heads", "steps", "seeds", "one sign only", "debiased_gd", "a dummy head")
    return markdown(header, rows)


def calibration_labels(results: Path) -> str:
    """Table of true pattern and label, for the confirming models."""
    found = pd.read_csv(results / "calibration_labels.csv").set_index("truth")
    rows = [(truth, *(f"{count}" for count in row)) for truth, row in found.iterrows()]
    return markdown(("truth", *found.columns), rows)


SOURCES = {
    "built + noise": "built + noise",
    "fault": "debiased pairs with a fault",
    "near miss": "near misses",
    "random steps": "random linear steps",
    "random weights": "random weights",
    "snapshot": "snapshots of trained models",
}


def calibration_errors(results: Path) -> str:
    """Verdicts on the models of each source, and the fraction of wrong labels among the named
    models."""
    found = pd.read_csv(results / "calibration_errors.csv")
    found["source"] = found.source.str.split(":").str[0].map(SOURCES)
    columns = ["models", "right", "undetermined", "missed", "wrong"]
    counts = found.groupby("source", sort=False)[columns].sum()
    counts.loc["all"] = counts.sum()
    rows = [
        (source, *(f"{row[name]}" for name in columns), of_the_named(row.wrong, row.right))
        for source, row in counts.iterrows()
    ]
    header = ("source", "models", "right", "undetermined (allowed)", "missed", "wrong")
    return markdown((*header, "wrong, among named models (95% interval)"), rows)


def two_by_two(results: Path) -> str:
    """Models with a clear, a disturbed or no pattern, and how many of them were named."""
    found = pd.read_csv(results / "calibration_models.csv")
    plain, without = found.demand == "must", found.truth == "no pattern"
    kinds = {
        "with a clear pattern": plain,
        "with a strongly disturbed pattern": ~plain & ~without,
        "without a pattern": without,
    }
    rows = []
    for kind, chosen in kinds.items():
        verdicts = found[chosen].verdict.value_counts()
        right, wrong = (int(verdicts.get(name, 0)) for name in ("right", "wrong"))
        rows.append(
            (
                kind,
                f"{right + wrong}",
                of_the_named(wrong, right),
                f"{chosen.sum() - right - wrong}",
            )
        )
    return markdown((f"{len(found):,} models", "named", "wrong among these", "not named"), rows)


def of_the_named(wrong: int, right: int) -> str:
    """Wrong labels among the named models, with Wilson's 95% interval.

    Example:
        >>> of_the_named(0, 50), of_the_named(0, 0)
        ('0 of 50 (0% to 7.1%)', '0 of 0')
    """
    named = wrong + right
    if not named:
        return "0 of 0"
    interval = binomtest(int(wrong), int(named)).proportion_ci(method="wilson")
    return f"{wrong} of {named} ({100 * interval.low:.2g}% to {100 * interval.high:.2g}%)"


def attack(results: Path) -> str:
    """Outcomes of damaged files, by seed, and their sums."""
    found = pd.read_csv(results.parents[1] / "tests" / "attack" / "outcomes.csv", index_col="seed")
    found.loc["all"] = found.sum()
    rows = [(f"{seed}", *(f"{count:,}" for count in counts)) for seed, counts in found.iterrows()]
    return markdown(("seed", *found.columns), rows)


def trained(results: Path) -> str:
    """Trained models of sparse regression, one column per number of heads and noise variance."""
    tables = {part: pd.read_csv(results / f"sparse_{part}.csv") for part in PARTS}
    settings = [(heads, noise) for noise in (0.1, 0.4) for heads in (1, 4, 8)]
    rows = [
        ("risk / ridge at its best", "risk", "to_ridge", 3),
        ("risk / Algorithm 1 at its best step", "risk", "to_algorithm", 2),
        ("risk / a single head's", "risk", "to_single", 3),
        ("effective heads by medians, first layer", "heads", "first", 1),
        ("effective heads by medians, later layers", "heads", "later", 1),
        ("one head per later layer: risk / the whole model's", "pruning", "ratio", 2),
        ("the same with a new read-out", "pruning", "refit_ratio", 2),
        ("the same trained for 5,000 more steps", "fine_tuning", "ratio", 2),
        ("R² of a probe of the first layer's output for (S − 1) x", "probes", "(S - 1) x", 3),
        ("R² of a probe of the first layer's output for R x", "probes", "R x", 3),
    ]
    header = ("", *(f"{heads} head{'s' * (heads > 1)}, noise {noise}" for heads, noise in settings))
    cells = [
        (text, *(trained_cell(tables[part], part, column, digits, *one) for one in settings))
        for text, part, column, digits in rows
    ]
    return markdown(header, cells)


PARTS = ("risk", "heads", "pruning", "fine_tuning", "probes")


def trained_cell(
    table: pd.DataFrame, part: str, column: str, digits: int, heads: int, noise: float
) -> str:
    """A number for the models of all seeds, with its largest standard error."""
    if heads == 1 and (part in PARTS[1:4] or column == "to_single"):
        return ""
    if part == "risk":
        chosen = (table.noise_var == noise) & (table.context_length == 40)
        rows = table[chosen & table.learner.str.startswith(f"h{heads} ")]
        return told(rows[column], rows[f"{column}_sem"], digits)
    rows = table[table.model.str.startswith(f"sparse-h{heads}-noise{noise}-")]
    if part == "heads":
        layers = rows[rows.method == "zero"].drop_duplicates(["model", "layer"])
        numbers = layers[(layers.layer == 0) == (column == "first")].effective_heads_of_medians
        return span(numbers, f".{digits}f")
    if part == "probes":
        rows = rows[(rows.target == column) & (rows.layer == 1)]
        return told(rows.r2, rows.r2_sem, digits)
    if part == "pruning":
        rows = rows[rows.rule == "best later"]
    else:
        rows = rows[(rows.heads == "pruned") & (rows.step == rows.step.max())]
    return told(rows[column], rows[f"{column}_sem"], digits)


def told(values: pd.Series, errors: pd.Series, digits: int) -> str:
    """Numbers by seed with their largest standard error."""
    return f"{', '.join(f'{v:.{digits}f}' for v in values)} ± {errors.max():.{digits}f}"
