"""One layer of attention on a pool of M tasks: closed form of linear attention, trained layers, and
softmax.

    python -m analyses.pools.one_layer RUNS [--out DIR] [--n-prompts N]

RUNS contains one-linear-m1, one-softmax-m1, ... of sweeps/pool_one_layer.json (d_x 5, 20 pairs,
noise variance 0.25, four heads, 20,000 steps of Adam). Excess risks on tasks of the pool and on new
tasks go to results/pools/pool_one_layer.csv."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from analyses.lib import RESULTS
from analyses.lib.measured import parsed, parser_of
from analyses.lib.theory.linear_pools import pool_optimum
from mechinterp import compare_priors, load

POOLS = (1, 2, 4, 8, 64)


def rows_of(runs: Path, n_tasks: int, n_prompts: int) -> list[dict[str, object]]:
    """Risks of every predictor for one pool."""
    rows = []
    for score in ("linear", "softmax"):
        checkpoint = load(runs / f"one-{score}-m{n_tasks}")
        task = checkpoint.task
        found = compare_priors(
            checkpoint, context_lengths=[task.context_length], n_prompts=n_prompts
        ).overall
        for at, kind in enumerate(("pool", "new")):
            told = {"n_tasks": n_tasks, "tasks": kind}
            rows.append(
                {**told, "predictor": f"{score}, trained", "risk": found.risk[at]}
                | {"risk_sem": found.risk_sem[at], "weight_dmmse": found.weight_dmmse[at]}
            )
            if score == "linear":
                rows += [
                    {**told, "predictor": "dMMSE", "risk": found.risk_dmmse[at]}
                    | {"risk_sem": found.risk_dmmse_sem[at]},
                    {**told, "predictor": "ridge", "risk": found.risk_ridge[at]}
                    | {"risk_sem": found.risk_ridge_sem[at]},
                ]
    best = pool_optimum(
        replace(task, n_tasks=n_tasks).pool()[..., 0].numpy(),
        torch.ones(task.d_x).numpy(),
        context_length=task.context_length,
        noise_var=task.noise_var,
    )
    for kind, risk in (("pool", best.pool_risk), ("new", best.new_risk)):
        told = {"n_tasks": n_tasks, "tasks": kind}
        rows.append({**told, "predictor": "linear, closed form", "risk": risk})
    return rows


def main() -> None:
    parser = parser_of(__doc__, out=RESULTS / "pools")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--n-prompts", type=int, default=20_000)
    given = parsed(parser)
    there = [n for n in POOLS if (given.runs / f"one-softmax-m{n}" / "config.json").exists()]
    rows = [row for n in there for row in rows_of(given.runs, n, given.n_prompts)]
    frame = pd.DataFrame(rows).sort_values(["tasks", "n_tasks", "predictor"])
    frame.to_csv(given.out / "pool_one_layer.csv", index=False, float_format="%.6g")
    wide = frame.pivot_table(index=["tasks", "n_tasks"], columns="predictor", values="risk")
    print(wide.round(4).to_string())


if __name__ == "__main__":
    main()
