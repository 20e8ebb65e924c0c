"""Figure 4: loss over the context length, by number of heads and next to closed-form learners.

He et al. 2025, arXiv 2503.12734, figure 4. All curves share 20,000 prompts per length. Observation
3 is measured on all one-head models and all models of both signs.
Run: python -m analyses softmax/figure_4_losses (five minutes; --quick 1,000 prompts)"""

from collections.abc import Callable
from functools import partial

import pandas as pd
import torch

from analyses.lib import Measured, Record, checkpoint, record, records
from analyses.lib.shared_losses import SharedLosses, shared_losses
from analyses.softmax.setting import BOTH_SIGNS, label, paired, single
from mechinterp import Prompts, TaskConfig, circuits, classify
from mechinterp.icl.predictors import debiased_gd, nadaraya_watson, ridge, vanilla_gd
from mechinterp.icl.prompts import prompt_chunks
from mechinterp.models.heads import predict

LENGTHS = tuple(range(10, 101, 10))
NAMES = {n_heads: f"softmax-h{n_heads}-s0" for n_heads in (1, 2, 4, 8)}


def measure(quick: bool) -> Measured:
    n_prompts = 1000 if quick else 20_000
    curves, every = figure(n_prompts), observed(n_prompts)
    frames = [
        curves.to_frame().assign(part="figure"),
        every.to_frame().assign(part="observation 3"),
    ]
    gaps = pd.DataFrame([step_gaps(name, 5 * n_prompts) for name in paired("softmax-h2-s*")])
    claims = [*number_records(curves), *loss_records(every), *step_records(gaps, 5 * n_prompts)]
    frames.append(gaps.assign(part="pairs"))
    return Measured(pd.concat(frames), {"losses": curves.plot()}, claims)


def figure(n_prompts: int) -> SharedLosses:
    """Curves of figure 4."""
    models = {name: checkpoint(name) for name in NAMES.values()}
    eta = float(classify(models[NAMES[2]]).scales.eta[0])
    one_head = circuits(models[NAMES[1]])
    kernel = {"omega": abs(one_head.omega_mean[0, 0]), "mu": abs(one_head.mu[0, 0, 0])}
    learners = {
        "debiased GD": partial(debiased_gd, eta=eta),
        "vanilla GD": partial(vanilla_gd, eta=eta),
        "kernel smoother": partial(nadaraya_watson, **kernel),
        "ridge (Bayes)": partial(ridge, penalty=0.5),
    }
    models, lengths = models | learners, tuple(range(10, 101, 5))
    return shared_losses(models, TaskConfig(), context_lengths=lengths, n_prompts=n_prompts)


def observed(n_prompts: int) -> SharedLosses:
    """Losses of all one-head models, all models of both signs, and the Bayes predictor."""
    models = {name: checkpoint(name) for name in single() + paired()}
    models["ridge (Bayes)"] = partial(ridge, penalty=0.5)
    shared = {"context_lengths": LENGTHS, "n_prompts": n_prompts, "seed": 3}
    return shared_losses(models, TaskConfig(), **shared)


def step_gaps(name: str, n_prompts: int) -> dict[str, float | str]:
    """Difference of a pair's losses from those of a debiased and of a vanilla step of its own size."""
    eta = float(label(name).scales.eta[0])
    steps = {"debiased": partial(debiased_gd, eta=eta), "vanilla": partial(vanilla_gd, eta=eta)}
    found = {"model": name, "rms": rms(name, steps["debiased"])}
    for kind, step in steps.items():
        models = {kind: step, name: checkpoint(name)}
        shared = {"context_lengths": LENGTHS, "n_prompts": n_prompts, "seed": 4}
        losses = shared_losses(models, TaskConfig(), **shared)
        long = losses.context_length >= 30
        gap, sem = losses.gap[:, 1], losses.gap_sem[:, 1]
        worst = abs(gap[long]).argmax()
        found |= {kind: abs(gap[long][worst]), f"{kind}_sem": sem[long][worst]}
    return found | {"short": -gap[0], "short_sem": sem[0]}


def rms(name: str, step: Callable[[Prompts], torch.Tensor]) -> float:
    """Root mean square difference of predictions at L = 40."""
    (prompts,) = prompt_chunks(TaskConfig(), 8192, seed=4)
    y_hat = predict(checkpoint(name).weights, prompts)
    return float((y_hat - step(prompts)).square().mean().sqrt())


def number_records(found: SharedLosses) -> list[Record]:
    """The published losses at L = 40."""
    loss = dict(zip(found.models, zip(found.loss[6], found.loss_sem[6], strict=True), strict=True))
    asked = {f"{n_heads}": {name: loss[name]} for n_heads, name in NAMES.items()}
    return records("softmax-loss-h", asked, over={"prompts": found.n_prompts})


def loss_records(found: SharedLosses) -> list[Record]:
    """O3a, O3b, O3d and O3e."""
    loss = pd.DataFrame(found.loss, index=LENGTHS, columns=found.models)
    names, several = single() + paired(), loss[paired()]
    better = several.rsub(loss[single()].min(axis=1), axis=0)
    ratio = several.max(axis=1) / several.min(axis=1) - 1
    bayes = loss[names].div(loss["ridge (Bayes)"], axis=0)
    over = {"prompts": found.n_prompts, "prompts' seed": 3} | BOTH_SIGNS
    asked = {"O3a-40": better.loc[40], "O3a-lengths": better.min()}
    asked["O3b"] = {f"L = {length}": value for length, value in ratio.items()}
    asked |= {"O3d": loss[names].diff().max(), "O3e": bayes.min()}
    return records("softmax-", asked, over=over)


def step_records(gaps: pd.DataFrame, n_prompts: int) -> list[Record]:
    """O3c, with the step given by a pair's own omega and mu."""
    rows = gaps.set_index("model")
    over = {"prompts": n_prompts, "prompts' seed": 4} | BOTH_SIGNS
    return [
        record(f"softmax-O3c-{name}", rows[name], errors=rows.get(f"{name}_sem"), over=over)
        for name in ("debiased", "rms", "vanilla", "short")
    ]
