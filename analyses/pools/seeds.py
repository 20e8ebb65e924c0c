"""Linear stacks on pools over seeds of the prompts: sensitivity of the means to a few prompts.

    python -m analyses.pools.seeds [RUNS] [--seeds N] [--n-prompts N] [--out DIR]

It writes results/pools/pool_seeds.csv, a row for each stack, seed and kind of tasks. Stacks are the shipped ones and those in the folder
RUNS, which sweeps/pool_linear.json trains; rows of models that are not there stay as they are.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd

from analyses.lib import RESULTS
from analyses.lib.measured import checkpoint, parsed, parser_of, shipped
from analyses.pools.map import ONLY_FULL, OTHERS
from mechinterp import compare_priors, load
from mechinterp.analysis.learners.pool_tasks import TASK_KINDS
from mechinterp.analysis.learners.priors import PriorComparison
from mechinterp.checkpoints.checkpoint import Checkpoint

TRIMMED = ("relative", "relative_sem", "risk", "risk_sem", "risk_ridge")


def rows_of(found: PriorComparison) -> list[dict[str, object]]:
    """Rows of both kinds of tasks for one comparison."""
    return [
        {
            "tasks": kind,
            "strategy": found.strategy,
            **{name: getattr(found.trimmed, name)[i] for name in TRIMMED},
            "all_risk": found.overall.risk[i],
            "median_risk": found.median_risk[i, 0],
            "carried_by_few": found.carried_by_few[i],
        }
        for i, kind in enumerate(TASK_KINDS)
    ]


def stacks(runs: Path | None) -> Iterator[tuple[str, Checkpoint]]:
    """Shipped stacks, then those of a folder that are not shipped, by name."""
    own = {name: checkpoint(name) for name in shipped("pool-linear-*")}
    yield from own.items()
    for folder in sorted(runs.glob("linear-*")) if runs else ():
        model = load(folder)
        if model.config not in [each.config for each in own.values()]:
            yield folder.name, model


def main() -> None:
    parser = parser_of(__doc__, out=RESULTS / "pools")
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--n-prompts", type=int, default=4096)
    given = parsed(parser)
    rows: list[dict[str, object]] = []
    for name, model in stacks(given.runs):
        task, config = model.task, model.config
        compared_with = task.n_tasks or OTHERS[0]
        about = {"model": name, "layers": config.model.n_layers, "n_tasks": task.n_tasks}
        about |= {"seed": config.seed, "compared_with": compared_with}
        pool = replace(task, n_tasks=compared_with).pool()
        for seed in range(given.seeds):
            found = compare_priors(
                model,
                pool=None if task.n_tasks else pool,
                context_lengths=[ONLY_FULL],
                n_prompts=given.n_prompts,
                seed=seed,
            )
            rows += [about | {"prompt_seed": seed} | row for row in rows_of(found)]
    table, file = pd.DataFrame(rows), given.out / "pool_seeds.csv"
    if file.exists():
        stored = pd.read_csv(file)
        table = pd.concat([table, stored[~stored.model.isin(table.model)]])
    table.to_csv(file, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
