"""Linear stacks on pools over seeds of the prompts: sensitivity of the means to a few prompts.

    python -m analyses.pools.seeds [--seeds N] [--n-prompts N] [--out DIR]

Writes results/pools/pool_seeds.csv, one row per shipped stack, seed and kind of tasks."""

import pandas as pd

from analyses.lib import RESULTS
from analyses.lib.measured import checkpoint, parsed, parser_of, shipped
from analyses.pools.map import ONLY_FULL
from mechinterp import compare_priors
from mechinterp.analysis.learners.closeness import KINDS
from mechinterp.analysis.learners.priors import PriorComparison

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
        for i, kind in enumerate(KINDS)
    ]


def main() -> None:
    parser = parser_of(__doc__, out=RESULTS / "pools")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--n-prompts", type=int, default=4096)
    given = parsed(parser)
    rows: list[dict[str, object]] = []
    for name in shipped("pool-linear-*"):
        model = checkpoint(name)
        for seed in range(given.seeds):
            found = compare_priors(
                model, context_lengths=[ONLY_FULL], n_prompts=given.n_prompts, seed=seed
            )
            about = {"model": name, "n_tasks": found.n_tasks, "prompt_seed": seed}
            rows += [about | row for row in rows_of(found)]
    pd.DataFrame(rows).to_csv(given.out / "pool_seeds.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
