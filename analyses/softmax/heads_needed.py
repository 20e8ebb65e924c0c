"""Number of heads that two tasks need: the rank of the best joint step plus one. This is not a
question of the paper.

Heads with mu_h (from response m to n) and omega_h take the step theta_nmi = sum_h mu_hnm omega_hi;
mu sum to zero, so that H heads have rank H - 1. The best step has rank 2 if every task has its own
vector, and 3 if all tasks share one: each response is then predicted from the others too. Run:
python -m analyses softmax/heads_needed (two minutes; --quick seconds)"""

from functools import partial

import numpy as np
import pandas as pd

from analyses.lib import Measured, checkpoint, record, trained
from analyses.lib.shared_losses import shared_losses
from analyses.lib.theory import several_tasks as theory
from analyses.lib.theory.learners import joint_debiased_gd
from mechinterp import TaskConfig, circuits, heatmaps

KINDS = {"two-tasks": "own", "shared-tasks": "shared"}


def moments_of(task: TaskConfig) -> theory.StepMoments:
    law = {name: getattr(task, name) for name in ("context_length", "noise_var", "shared_beta")}
    law |= {"beta_var": task.beta_variance, "d_x": 6}
    return theory.step_moments(
        task.supports, query_noise_var=task.noise_var * task.query_noise, **law
    )


def step_of(name: str) -> np.ndarray:
    """theta of a model, [n, m, i]."""
    heads = circuits(checkpoint(name))
    return np.einsum("hmn,hi->nmi", heads.OV[0, :, 6:], heads.omega[0])


def measured(convention: str, n_heads: int, n_prompts: int) -> pd.DataFrame:
    """Losses next to that of the best step of rank H - 1, and the distance of theta from the best
    step of any rank."""
    names = trained(f"{convention}-h{n_heads}-s*")
    task = checkpoint(names[0]).config.task
    moments = moments_of(task)
    best, theta = theory.joint_step(moments), theory.joint_step_of_rank(moments, n_heads - 1)
    models = {"step": partial(joint_debiased_gd, theta=theta)}
    models |= {name: checkpoint(name) for name in names}
    losses, found = shared_losses(models, task, n_prompts=n_prompts), []
    for index, name in enumerate(names, 1):
        row = {"model": name, "convention": convention, "n_heads": n_heads}
        row |= {"risk": theory.joint_step_risk(theta, moments), "gap": losses.gap[0, index]}
        row["gap_sem"] = losses.gap_sem[0, index]
        found.append(row | {"theta_gap": np.abs(step_of(name) - best).max()})
    return pd.DataFrame(found)


def measure(quick: bool) -> Measured:
    n_prompts, claims = 10_000 if quick else 200_000, []
    data = pd.concat([measured(c, h, n_prompts) for c in KINDS for h in (2, 3, 4, 5)])
    for (convention, n_heads), group in data.groupby(["convention", "n_heads"], sort=False):
        named = group.set_index("model")
        gaps, sems = named.gap / named.risk, named.gap_sem / named.risk
        id = f"softmax-heads-needed-{KINDS[convention]}-h{n_heads}"
        claims.append(record(id, gaps, errors=sems, over={"prompts": n_prompts}))
    full = data[data.n_heads >= 4].set_index("model")
    for convention, kind in KINDS.items():
        gaps = full.theta_gap[full.convention == convention]
        claims.append(record(f"softmax-heads-needed-{kind}-theta", gaps))
    name = "shared-tasks-h4-s0"
    best, pages = theory.joint_step(moments_of(checkpoint(name).config.task)), {}
    rows = [f"y{m} for y{n}" for n in (1, 2) for m in (1, 2)]
    columns = [f"x{i}" for i in range(1, 7)]
    for title, theta in {
        "trained": step_of(name).reshape(4, 6),
        "best": best.reshape(4, 6),
    }.items():
        title = f"theta, {title}: {name}"
        pages[title] = heatmaps.heatmap(theta, title=title, rows=rows, columns=columns)
    return Measured(data, pages, claims)
