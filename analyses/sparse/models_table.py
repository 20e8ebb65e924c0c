"""The table of trained models of sparse regression in analyses/README.md, from the *.csv of
sparse_risk, _heads, _pruning, _fine_tuning and _probes. Errors of a model are over prompts, and of
pruning over which heads are chosen, too; a row below the models of a setting has their mean and its
standard error over seeds.

`lib/pages.py` writes it.
"""

from pathlib import Path

import pandas as pd

LENGTH = 40
RIVALS = ("ridge", "algorithm", "single")
PARTS = ("risk", "heads", "pruning", "fine_tuning", "probes")
COLUMNS = (
    *(
        "model",
        "risk / ridge at its best",
        "risk / Algorithm 1 at its best",
        "risk / a single head's",
    ),
    *(
        "effective heads by medians, layer by layer",
        "one head per later layer: risk / whole model's",
        "with a new read-out",
    ),
    "after 5,000 more steps",
    "R² of what the first layer writes: (S − 1) x; R x",
)


def told(value: float, sem: float, digits: int = 3) -> str:
    """A number with its standard error.

    Example:
        >>> told(0.5, 0.01)
        '0.500 ± 0.010'
    """
    return f"{value:.{digits}f} ± {sem:.{digits}f}"


def numbers(
    name: str, row: pd.Series, tables: dict[str, pd.DataFrame]
) -> dict[str, tuple[float, float]]:
    """What has a standard error, by column, from the row of the model's risks; NaN where there is
    nothing."""
    pruning, tuning = (
        tables[part][tables[part].model == name] for part in ("pruning", "fine_tuning")
    )
    nothing = (float("nan"), float("nan"))
    found = {
        column: (row[f"to_{rival}"], row[f"to_{rival}_sem"])
        for column, rival in zip(COLUMNS[1:4], RIVALS, strict=True)
    }
    if pruning.empty:
        return found | dict.fromkeys((COLUMNS[3], *COLUMNS[5:8]), nothing)
    later = pruning[pruning.rule == "best later"].iloc[0]
    more = tuning[tuning.heads == "pruned"].iloc[-1]
    costs = (
        (later.ratio, later.ratio_sem),
        (later.refit_ratio, later.refit_ratio_sem),
        (more.ratio, more.ratio_sem),
    )
    return found | dict(zip(COLUMNS[5:8], costs, strict=True))


def one_model(name: str, row: pd.Series, tables: dict[str, pd.DataFrame]) -> dict[str, str]:
    """A row of the table, by column."""
    heads, probes = (tables[part][tables[part].model == name] for part in ("heads", "probes"))
    written = probes[probes.layer == 1].set_index("target").r2
    layers = heads[heads.method == "zero"].drop_duplicates("layer").effective_heads_of_medians
    cells = {
        "model": name,
        COLUMNS[4]: ", ".join(f"{number:.1f}" for number in layers),
        COLUMNS[8]: f"{written['(S - 1) x']:.3f}; {written['R x']:.3f}",
    }
    return cells | shown(numbers(name, row, tables))


def over_seeds(setting: str, models: list[dict[str, tuple[float, float]]]) -> dict[str, str]:
    """A row with the mean over seeds and its standard error, which is that of the spread of the
    seeds alone.

    Example:
        >>> over_seeds("sparse-h4", [{"risk": (1.0, 0.1)}, {"risk": (1.2, 0.1)}])["risk"]
        '1.100 ± 0.100'
    """
    values = pd.DataFrame([{column: value for column, (value, _) in one.items()} for one in models])
    pairs = {c: (values[c].mean(), values[c].std() / len(models) ** 0.5) for c in values}
    return {"model": f"mean over {len(models)} seeds of {setting}"} | shown(pairs)


def shown(pairs: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Numbers with their errors, ratios of pruning with two digits; nothing where there is no
    number."""
    return {
        column: "" if pd.isna(value) else told(value, sem, 2 if column in COLUMNS[5:8] else 3)
        for column, (value, sem) in pairs.items()
    }


def markdown(results: Path) -> str:
    """A row per model, those of less noise and fewer heads first, and one over the seeds of each
    setting."""
    tables = {part: pd.read_csv(results / f"sparse_{part}.csv") for part in PARTS}
    risks = tables["risk"].query("context_length == @LENGTH and to_single == to_single")
    kinds = risks.learner.str.split().str[0]
    rows = []
    for (noise, heads), models in risks.groupby([risks.noise_var, kinds], sort=False):
        setting = f"sparse-{heads}-noise{noise}"
        named = {f"{setting}-{row.learner.split()[1]}": row for _, row in models.iterrows()}
        rows += [one_model(name, row, tables) for name, row in named.items()]
        if len(named) > 1:
            found = [numbers(name, row, tables) for name, row in named.items()]
            rows.append(over_seeds(setting, found))
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row.get(c, "") for c in COLUMNS] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
