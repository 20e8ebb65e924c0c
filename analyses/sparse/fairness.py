"""Where few layers leave Algorithm 1 anything to win: its fitted steps against those of GD.

No training. A model of n layers has room for the correlations r in its first layer and n - 1 steps
on R x, or for n steps on x. Each step has one size for all prompts, as fixed weights have it; the
sizes are free, fitted on 8,192 prompts and measured on 20,000 others (sparse/steps.py). Errors are
over both: those of a jackknife of the fit, eight blocks, are added to those of the prompts. Where
the ratio of the risks is above 0.9, the published mechanism is not expected of training. Beside
it: Algorithm 1 with x kept (`both`), which a model can do, too, and LISTA with n steps.
Run: python -m analyses sparse/fairness (an hour; --quick half a minute)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analyses.lib import Measured
from analyses.lib.measured import ROOT
from analyses.sparse import steps
from analyses.sparse.setting import SMALL, WIDE, ratio
from mechinterp import TaskConfig
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.training.sweep_file import load_sweep

LIMIT = 0.9
PLAN = ROOT / "analyses" / "sweeps" / "sparse_settings.json"
OTHERS = (
    SMALL,
    replace(SMALL, sparsity=2, noise_var=0.1),
    *(replace(WIDE, noise_var=noise) for noise in (0.1, 0.4)),
)
"""Tasks of which no model is trained now."""
LAYERS = (3, 4)
TASK = ("d_x", "sparsity", "context_length", "nonzeros", "noise_var")


@dataclass(frozen=True)
class Fair:
    """A learner with the numbers that suit a task."""

    sizes: str
    """They, step by step, the second number of a step behind a slash."""
    errors: np.ndarray
    """Excess risk of each prompt that it is measured on."""
    without: np.ndarray
    """The mean of those when a block of the prompts is left out of the fit, block by block."""

    @property
    def risk(self) -> tuple[float, float]:
        mean, sem = mean_and_sem(self.errors)
        return float(mean), float(np.hypot(sem, steps.jackknife(self.without)))

    def over(self, other: "Fair") -> tuple[float, float]:
        """Ratio of the risks, and its standard error."""
        value, sem = ratio(self.errors, other.errors)
        return value, float(np.hypot(sem, steps.jackknife(self.without / other.without)))


def fair(name: str, n_layers: int, fit: steps.Moments, scored: steps.Moments) -> Fair:
    learner = steps.LEARNERS[name]
    sizes = steps.fitted(learner, fit, n_layers)
    without = [
        steps.risk(learner, one, scored).item() for one in steps.left_out(learner, sizes, fit)
    ]
    told = ["/".join(f"{value:.3g}" for value in step) for step in sizes.tolist()]
    found = steps.errors(learner.path, sizes, *scored).numpy()
    return Fair(" ".join(told), found, np.array(without))


def tasks() -> list[TaskConfig]:
    """Those of the plan, each once, then the others."""
    return list(dict.fromkeys([config.task for config in load_sweep(PLAN).values()] + [*OTHERS]))


def rows(task: TaskConfig, n_fit: int, n_scored: int) -> Iterator[dict[str, object]]:
    """One row per number of layers."""
    fit, scored = (steps.drawn(task, n, step=step) for step, n in enumerate((n_fit, n_scored)))
    law = {name: getattr(task, name) for name in TASK}
    for layers in LAYERS:
        row = law | {"n_layers": layers}
        found = {name: fair(name, layers, fit, scored) for name in steps.LEARNERS}
        for name, one in found.items():
            row[name], row[f"{name}_sem"] = one.risk
        for name in ("algorithm", "both", "lista"):
            row[f"{name}_to_gd"], row[f"{name}_to_gd_sem"] = found[name].over(found["gd"])
        row["expected"] = row["algorithm_to_gd"] <= LIMIT
        yield row | {f"{name}_sizes": one.sizes for name, one in found.items()}
        print(*row.values(), flush=True)


def measure(quick: bool) -> Measured:
    counts = (512, 512) if quick else (steps.FIT, steps.SCORED)
    return Measured(pd.DataFrame([row for task in tasks() for row in rows(task, *counts)]))
