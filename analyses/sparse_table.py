"""The table of trained models of sparse regression in README.md, from the *.csv of sparse_risk, _heads, _pruning, _fine_tuning
and _probes.

python analyses/sparse_table.py  (at once; these scripts must have run)
"""

from pathlib import Path

import pandas as pd
from claims_table import replaced

HERE = Path(__file__).parent
LENGTH = 40
PARTS = ("risk", "heads", "pruning", "fine_tuning", "probes")
COLUMNS = (
    *("model", "risk / ridge at its best", "risk / Algorithm 1 at its best", "risk / a single head's"),
    *("effective heads, layer by layer", "one head per later layer: risk / whole model's", "with a new read-out"),
    "after 5,000 more steps",
    "R² of what the first layer writes: (S − 1) x; R x",
)  # fmt: skip


def told(value: float, sem: float, digits: int = 3) -> str:
    """A number with its standard error.

    Example:
        >>> told(0.5, 0.01)
        '0.500 ± 0.010'
    """
    return f"{value:.{digits}f} ± {sem:.{digits}f}"


def one_model(name: str, row: pd.Series, tables: dict[str, pd.DataFrame]) -> tuple[str, ...]:
    """A row of the table, from the row of its risks."""
    heads, pruning, tuning, probes = (table[table.model == name] for part, table in tables.items() if part != "risk")  # fmt: skip
    written = probes[probes.layer == 1].set_index("target").r2
    ends = (f"{written['(S - 1) x']:.3f}; {written['R x']:.3f}",)
    risks = [told(row[f"to_{rival}"], row[f"to_{rival}_sem"]) for rival in ("ridge", "algorithm", "single")]  # fmt: skip
    if heads.empty:
        return name, *risks[:2], "", "", "", "", "", *ends
    layers = heads[heads.method == "zero"].drop_duplicates("layer")
    later = pruning[pruning.rule == "best later"].iloc[0]
    more = tuning[tuning.heads == "pruned"].iloc[-1]
    spread = ", ".join(f"{number:.1f}" for number in layers.effective_heads)
    costs = ((later.ratio, later.ratio_sem), (later.refit_ratio, later.refit_ratio_sem), (more.ratio, more.ratio_sem))  # fmt: skip
    return name, *risks, spread, *(told(*cost, 2) for cost in costs), *ends


def markdown(results: Path) -> str:
    """A row per model, those of less noise and fewer heads first."""
    tables = {part: pd.read_csv(results / f"sparse_{part}.csv") for part in PARTS}
    risks = tables["risk"].query("context_length == @LENGTH and to_single == to_single")
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for _, row in risks.iterrows():
        heads, seed = row.learner.split()
        rows.append(one_model(f"sparse-{heads}-noise{row.noise_var}-{seed}", row, tables))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    file = HERE / "README.md"
    text = replaced(file.read_text(encoding="utf-8"), "trained", markdown(HERE / "results"))
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
