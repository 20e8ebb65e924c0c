"""Tables of the page on pools of tasks, from the CSV files of pools/map.py and pools/one_layer.py."""

from pathlib import Path

import pandas as pd

from analyses.lib.result_tables import markdown

KINDS = {
    "gpt2": "GPT-2",
    "linear-l3": "linear, 3 layers",
    "linear-l2": "linear, 2 layers",
}
PREDICTORS = ("linear, trained", "softmax, trained", "dMMSE", "ridge")


def pool_map(results: Path) -> str:
    """All models of the map with their strategy by the rules of the plan, one line per pool of
    comparison."""
    found = pd.read_csv(results / "pools" / "pool_map.csv")
    order = found.kind.map(list(KINDS).index)
    found = found.assign(order=order).sort_values(["order", "n_tasks", "seed", "compared_with"])
    chosen = [columns for columns in found.groupby(["model", "compared_with"], sort=False)]
    header = ("model", "M", "compared with", "relative, pool", "relative, new")
    header += ("weight on dMMSE, pool", "risk, pool (dMMSE; ridge)", "risk, new (ridge)")
    return markdown((*header, "by the rules"), [_row(rows) for _, rows in chosen])


def _row(rows: pd.DataFrame) -> tuple[str, ...]:
    pool, new = (rows[rows.tasks == kind].iloc[0] for kind in ("pool", "new"))
    own = pool.n_tasks == pool.compared_with
    return (
        KINDS[pool.kind] + (f", seed {pool.seed}" if pool.seed else ""),
        "none" if pd.isna(pool.n_tasks) else f"{pool.n_tasks:,.0f}",
        "its pool" if own else f"the first {pool.compared_with:,}",
        _told(pool.relative, pool.relative_sem),
        _told(new.relative, new.relative_sem),
        _told(pool.weight_dmmse, pool.weight_dmmse_sem),
        f"{pool.risk:.3g} ({pool.risk_dmmse:.3g}; {pool.risk_ridge:.3g})",
        f"{new.risk:.3g} ({new.risk_ridge:.3g})",
        pool.strategy,
    )


def every(results: Path) -> str:
    """GPT-2s trained on the loss at every position, one line per pool: ranges over the seeds at the
    last step."""
    found = pd.read_csv(results / "pools" / "pool_every.csv")
    found = found[found.set.isin(["map", "long", "long alone"])]
    last = found[found.step == found.groupby("set").step.transform("max")]
    last = last.sort_values(["n_tasks", "step"], kind="stable")
    header = ("M", "steps", "loss / dMMSE's, pool", "loss / ridge's, new", "relative, pool")
    header += ("relative, new", "highest on new, step", "by the rules")
    rows = []
    for (name, n_tasks), one in last.groupby(["set", "n_tasks"], sort=False, dropna=False):
        pool, new = (one[one.tasks == kind].sort_values("seed") for kind in ("pool", "new"))
        path = found[(found.set == name) & (found.tasks == "new") & (found.step >= 1000)]
        path = path[path.n_tasks.eq(n_tasks) | (path.n_tasks.isna() & pd.isna(n_tasks))]
        means = path.groupby("step").relative.mean()
        rules = [every_rule(*pair) for pair in zip(pool.iloc, new.iloc, strict=True)]
        rows.append(
            (
                "none" if pd.isna(n_tasks) else f"{n_tasks:,.0f}",
                f"{one.step.iloc[0]:,}" + (" of 64 prompts" if name != "map" else ""),
                *(_range(each) for each in (pool.loss_over_dmmse, new.loss_over_ridge)),
                *(_range(each) for each in (pool.relative, new.relative)),
                f"{means.max():.2f}, {means.idxmax():,}",
                ", ".join(f"{rule} {rules.count(rule)}" for rule in dict.fromkeys(rules)),
            )
        )
    return markdown(header, rows)


def every_rule(pool: pd.Series, new: pd.Series) -> str:
    """Strategy of a model by rules 1 to 3 of the plan."""
    if pool.unexplained > 0.5:
        return "neither"
    if pool.relative + 2 * pool.relative_sem < 0.5 and new.risk_over_ridge >= 2:
        return "memorises"
    near_ridge = new.relative - 2 * new.relative_sem > 0.5
    return "generalises" if near_ridge and new.risk_over_ridge <= 1.5 else "neither"


def _range(values: pd.Series) -> str:
    least, most = (f"{value:.3f}" for value in (values.min(), values.max()))
    return least if least == most else f"{least} to {most}"


def seeds(results: Path) -> str:
    """Stacks over seeds of the prompts: strategies, and how far each estimate moves."""
    found = pd.read_csv(results / "pools" / "pool_seeds.csv")
    found = found.sort_values(
        ["layers", "n_tasks", "seed"], kind="stable", ascending=[False, True, True]
    )
    header = (
        "stack",
        "tasks",
        "strategy",
        "relative (trimmed)",
        "risk (trimmed)",
        "median",
        "risk, all",
    )
    rows = []
    for (_, kind), one in found.groupby(["model", "tasks"], sort=False):
        counts = one.strategy.value_counts()
        few = f"{one.carried_by_few.sum()} of {len(one)} by few"
        rows.append(
            (
                _stack(one.iloc[0]),
                kind,
                ", ".join(f"{name} {count}" for name, count in counts.items()),
                _spread(one.relative),
                _spread(one.risk),
                _spread(one.median_risk),
                f"{one.all_risk.min():.3g} to {one.all_risk.max():.3g}; {few}",
            )
        )
    return markdown(header, rows)


def _stack(row: pd.Series) -> str:
    shipped = "" if row.model.startswith("pool-") else ", trained again"
    pool = (
        f"none (the first {row.compared_with})" if pd.isna(row.n_tasks) else f"{row.n_tasks:,.0f}"
    )
    seed = f", seed {row.seed}" if row.seed else ""
    return f"{row.layers} layers, M = {pool}{seed}{shipped}"


def _spread(values: pd.Series) -> str:
    return f"{values.mean():.3g} (sd {values.std():.1g})"


def one_layer(results: Path) -> str:
    """Excess risks of one layer of attention on a pool."""
    found = pd.read_csv(results / "pools" / "pool_one_layer.csv")
    found = found.set_index(["n_tasks", "predictor", "tasks"]).sort_index()
    rows = []
    for n_tasks in found.index.unique("n_tasks"):
        closed = [found.loc[n_tasks, "linear, closed form", kind].risk for kind in ("pool", "new")]
        cells = [f"{closed[0]:.4g}; {closed[1]:.4g}"]
        for name in PREDICTORS:
            both = [found.loc[n_tasks, name, kind] for kind in ("pool", "new")]
            cells.append("; ".join(f"{one.risk:.3g} ± {one.risk_sem:.1g}" for one in both))
        rows.append((f"{n_tasks}", *cells))
    header = ("M", "closed form: pool, new", *(f"{name}: pool, new" for name in PREDICTORS))
    return markdown(header, rows)


def _told(value: float, sem: float) -> str:
    digits = 4 if sem < 5e-4 else 3
    return f"{value:.{digits}f} ± {sem:.{digits}f}"
