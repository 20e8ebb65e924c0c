"""The local learning coefficient of a model: how fast the volume of weights of nearly its loss shrinks with the loss.

lambda_hat = n_beta (E[L(w)] - L(w*)), w drawn from exp(-n_beta L(w) - (localisation / 2) |w - w*|^2). At a quadratic
minimum in D directions it is D / 2; of linear attention trained on moments the exact value is known. Away from a
minimum the estimate means nothing, and none is given.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from mechinterp.analysis.training.coefficient_result import LearningCoefficient
from mechinterp.analysis.training.langevin import Langevin, langevin_draws
from mechinterp.analysis.training.local_losses import (
    LocalLoss,
    heads_of_linear,
    population_loss,
    prompts_loss,
)
from mechinterp.analysis.training.minima import FALL, descend, why_no_minimum
from mechinterp.analysis.training.sampler import (
    Chains,
    effective_draws,
    hamiltonian_draws,
    mean_error,
    r_hat,
)
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source
from mechinterp.models.weights import Weights
from mechinterp.progress import ProgressCallback, no_progress
from mechinterp.training.linear.trainer import task_moments

N_BETA = 30_000.0
LOCALISATION = 1.0
PROMPT_CHAINS = Chains(n_chains=4, n_draws=200, n_warmup=100, n_leapfrog=20)
"""On prompts a gradient takes milliseconds."""


def local_learning_coefficient(
    source: Source,
    *,
    step: int | None = None,
    sampled_heads: Sequence[int] | None = None,
    n_beta: float = N_BETA,
    localisation: float = LOCALISATION,
    other_n_beta: Sequence[float] = (),
    chains: Chains | None = None,
    langevin: Langevin | None = None,
    settle: bool = False,
    n_prompts: int = 1024,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> LearningCoefficient:
    """The local learning coefficient of a checkpoint, by Hamiltonian Monte Carlo.

    Linear attention that was trained on moments has the exact loss of its population, everything else the loss on
    `n_prompts` prompts.

    Args:
        step: A kept step of training; None: the last weights.
        sampled_heads: Heads of linear attention whose entries are drawn; None: all.
        localisation: Strength of the pull to the weights, unit 1 / weight^2.
        other_n_beta: Temperatures to estimate at besides, for `plot_curve`.
        chains: Number and length of chains; None: 8 of 1,000 draws, on prompts 4 of 200.
        langevin: Draw by stochastic gradients on mini-batches, as is usual elsewhere, in the place of Hamiltonian Monte
            Carlo: biased, by as much as step size and mini-batches make it, and `bias` says so.
        settle: Whether to go to the minimum that descent finds first, as no model is at the minimum of the loss on a
            set of prompts that it was not trained on. It may be far: how far is in `moved`.
        n_prompts: Of the loss on prompts.
    Raises:
        ValueError: If the gradient of such a model is not written out, there is no such step or head, or a number is
            not positive.
    Source:
        Lau et al. 2023, arXiv 2308.12108; the exact values are derived in theory.learning_coefficient.
    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> chains = Chains(n_chains=4, n_draws=100, n_warmup=50)
        >>> found = local_learning_coefficient(load("checkpoints/linear-separate-s0"), chains=chains)
        >>> found.exact, abs(found.estimate - 8) < 4 * found.sem
        (8.0, True)
    """
    checkpoint = checkpoint_of(source, "local_learning_coefficient")
    usual = Chains() if is_trained_on_moments(checkpoint) else PROMPT_CHAINS
    return coefficient_of_loss(
        _loss_of(checkpoint, step, sampled_heads, n_prompts, seed),
        n_beta=n_beta,
        localisation=localisation,
        other_n_beta=other_n_beta,
        chains=chains or usual,
        langevin=langevin,
        settle=settle,
        seed=seed,
        progress=progress,
    )


def _loss_of(
    checkpoint: Checkpoint,
    step: int | None,
    sampled_heads: Sequence[int] | None,
    n_prompts: int,
    seed: int,
) -> LocalLoss:
    """That of the population where the model was trained on its moments, else that on prompts."""
    weights = _weights_at(checkpoint, step)
    if is_trained_on_moments(checkpoint):
        heads, task = heads_of_linear(weights), checkpoint.task
        chosen = _heads(sampled_heads, heads.v.size)
        return population_loss(heads, task_moments(task), sampled_heads=chosen, task=task)
    if sampled_heads is not None:
        raise ValueError("sampled_heads is of linear attention trained on moments only.")
    drawn = evaluation_prompts(checkpoint, n_prompts=n_prompts, seed=seed)
    return prompts_loss(checkpoint, weights, drawn)


def is_trained_on_moments(checkpoint: Checkpoint) -> bool:
    """Whether it is one layer of linear attention whose heads are v, K and Q (or U) alone."""
    model, train = checkpoint.config.model, checkpoint.config.train
    return model.score == "linear/L" and model.one_attention and train.optimizer != "adam"


def coefficient_of_loss(
    loss: LocalLoss,
    *,
    n_beta: float = N_BETA,
    localisation: float = LOCALISATION,
    other_n_beta: Sequence[float] = (),
    chains: Chains | None = None,
    langevin: Langevin | None = None,
    settle: bool = False,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> LearningCoefficient:
    """The local learning coefficient of any loss with a gradient; arguments as in `local_learning_coefficient`.

    Example:
        >>> def square(points):
        ...     return (points[:, :3] ** 2).sum(1), np.pad(2 * points[:, :3], ((0, 0), (0, 2)))
        >>> loss = LocalLoss(square, np.zeros(5), "5 entries", "a quadratic in 3 of them", exact=1.5)
        >>> found = coefficient_of_loss(loss, chains=Chains(4, 300, 100, 10))
        >>> found.is_minimum, abs(found.estimate - 1.5) < 4 * found.sem
        (True, True)
    """
    for name, value in (("n_beta", n_beta), ("localisation", localisation)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be > 0, got {value}.")
    moved = 0.0
    if settle:
        settled, _ = descend(loss, n_beta, 0.0, most=20_000)
        moved = float(np.linalg.norm(settled - loss.at))
        loss = replace(loss, at=settled)
    chains = Chains() if chains is None else chains
    first, *curve = (
        _estimate(loss, each, localisation, chains, langevin, seed, progress)
        for each in (n_beta, *other_n_beta)
    )
    return replace(first, moved=moved, curve=tuple(replace(each, moved=moved) for each in curve))


def _estimate(
    loss: LocalLoss,
    n_beta: float,
    localisation: float,
    chains: Chains,
    langevin: Langevin | None,
    seed: int,
    progress: ProgressCallback,
) -> LearningCoefficient:
    found = _before_drawing(loss, n_beta, localisation, chains)
    if found.reason:
        return found
    if langevin is None:
        draw = partial(hamiltonian_draws, loss.function, loss.at, chains)
    else:
        draw = partial(langevin_draws, loss, chains, langevin)
    draws = draw(n_beta=n_beta, localisation=localisation, seed=seed, progress=progress)
    excess = draws.excess
    found = replace(
        found,
        excess=excess,
        reason=why_no_minimum(excess),
        acceptance=float(draws.accepted.mean()),
        r_hat=r_hat(excess),
        effective_draws=effective_draws(excess),
        bias="" if langevin is None else langevin.bias,
    )
    if found.reason:
        return found
    estimate, sem = float(excess.mean()), mean_error(excess)
    return replace(found, is_minimum=True, estimate=estimate, sem=sem, per_chain=excess.mean(1))


def _before_drawing(
    loss: LocalLoss, n_beta: float, localisation: float, chains: Chains
) -> LearningCoefficient:
    """What is known without draws; with a reason if descent shows that the weights are no minimum."""
    value, gradient = loss.function(loss.at[None])
    _, fall = descend(loss, n_beta, localisation)
    norm = float(np.linalg.norm(gradient))
    lower = f"descent lowers n_beta L by {fall:.3g}, the loss by {fall / n_beta:.3g}"
    return LearningCoefficient(
        exact=loss.exact,
        reason=f"{lower} (gradient {norm:.2g}){loss.remedy}." if fall > FALL else "",
        unknown=loss.unknown,
        per_chain=np.full(chains.n_chains, math.nan),
        excess=np.zeros((chains.n_chains, 0)),
        n_beta=n_beta,
        localisation=localisation,
        loss=float(value[0]),
        gradient_norm=norm,
        fall=fall,
        sampled=loss.sampled,
        over=loss.over,
    )


def _weights_at(checkpoint: Checkpoint, step: int | None) -> Weights:
    if step is None:
        return checkpoint.weights
    if step not in checkpoint.snapshots:
        kept = ", ".join(map(str, list(checkpoint.snapshots)[:6])) or "none"
        raise ValueError(f"step must be one that is kept ({kept}, ...), got {step}.")
    return checkpoint.snapshots[step]


def _heads(sampled: Sequence[int] | None, n_heads: int) -> list[int] | None:
    if sampled is None:
        return None
    chosen = sorted(set(sampled))
    if not chosen or chosen[0] < 0 or chosen[-1] >= n_heads:
        raise ValueError(
            f"sampled_heads must name heads from 0 to {n_heads - 1}, got {list(sampled)}."
        )
    return chosen
