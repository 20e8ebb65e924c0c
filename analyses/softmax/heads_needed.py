"""How many heads two tasks need: the rank of the best joint step, plus one. Not asked by the paper.

Heads with mu_h (from response m to n) and omega_h take the step theta_nmi = sum_h mu_hnm omega_hi;
mu sum to zero, so that H heads have rank H - 1. The best step has rank 2 where every task has its
own vector, and 3 where all share one: then each response is predicted from the others, too. Run:
python -m analyses.softmax.heads_needed (two minutes; --quick seconds)
"""

from functools import partial

import numpy as np
import pandas as pd

from analyses.lib.measured import Measured, checkpoint, run, shipped
from analyses.lib.records import record
from analyses.softmax.tasks import CONVENTIONS
from mechinterp import figures
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import joint_debiased_gd
from mechinterp.theory.several_tasks import (
    StepMoments,
    joint_step,
    joint_step_of_rank,
    joint_step_risk,
    step_moments,
)


def moments_of(task: TaskConfig) -> StepMoments:
    query = task.noise_var if task.query_noise else 0.0
    return step_moments(
        task.supports,
        d_x=6,
        context_length=task.context_length,
        beta_var=task.beta_variance,
        noise_var=task.noise_var,
        query_noise_var=query,
        shared_beta=task.shared_beta,
    )


def rows(convention: str, n_heads: int, n_prompts: int) -> pd.DataFrame:
    """Losses beside that of the best step of rank H - 1, and how far theta is from the best of any
    rank."""
    names = shipped(f"{convention}-h{n_heads}-s*")
    task = checkpoint(names[0]).config.task
    moments = moments_of(task)
    best, theta = joint_step(moments), joint_step_of_rank(moments, n_heads - 1)
    models = {"step": partial(joint_debiased_gd, theta=theta)} | {
        name: checkpoint(name) for name in names
    }
    losses, found = shared_losses(models, task, n_prompts=n_prompts), []
    for index, name in enumerate(names, 1):
        heads = circuits(checkpoint(name))
        own = np.einsum("hmn,hi->nmi", heads.OV[:, 6:], heads.omega)
        row = {"model": name, "convention": convention, "n_heads": n_heads}
        row |= {
            "risk": joint_step_risk(theta, moments),
            "gap": losses.gap[0, index],
            "gap_sem": losses.gap_sem[0, index],
        }
        found.append(row | {"theta_gap": np.abs(own - best).max()})
    return pd.DataFrame(found)


def measure(quick: bool) -> Measured:
    n_prompts, claims = 10_000 if quick else 200_000, []
    data = pd.concat([rows(c, h, n_prompts) for c in CONVENTIONS for h in (2, 3, 4, 5)])
    for (convention, n_heads), group in data.groupby(["convention", "n_heads"], sort=False):
        named = group.set_index("model")
        kind = "own" if convention == "two-tasks" else "shared"
        claims.append(
            record(
                f"softmax-heads-needed-{kind}-h{n_heads}",
                dict(named.gap / named.risk),
                errors=dict(named.gap_sem / named.risk),
                over={"prompts": n_prompts},
            )
        )
    for convention in CONVENTIONS:
        full = data[(data.convention == convention) & (data.n_heads >= 4)]
        kind = "own" if convention == "two-tasks" else "shared"
        claims.append(
            record(f"softmax-heads-needed-{kind}-theta", dict(full.set_index("model").theta_gap))
        )
    name = "shared-tasks-h4-s0"
    heads = circuits(checkpoint(name))
    own = np.einsum("hmn,hi->nmi", heads.OV[:, 6:], heads.omega)
    best, pages = joint_step(moments_of(checkpoint(name).config.task)), {}
    labels = {
        "rows": [f"y{m} for y{n}" for n in (1, 2) for m in (1, 2)],
        "columns": [f"x{i}" for i in range(1, 7)],
    }
    for title, theta in {"trained": own, "best": best}.items():
        pages[title] = figures.heatmap(
            theta.reshape(4, 6), title=f"theta, {title}: {name}", **labels
        )
    return Measured(data, pages, claims)


if __name__ == "__main__":
    run(measure, __file__)
