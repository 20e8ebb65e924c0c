"""Learned gates of heads: a factor between 0 and 1 per head, fitted with a reward for being open or
for being closed.

Masking measures one head while all others stay. Gates of all heads are fitted together, so that
they also reveal heads that replace each other or disturb each other."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import heatmaps
from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.stats import halves
from mechinterp.display import Result, frame_of, head_axes
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import CHUNK
from mechinterp.models.hooked.masks import Hooks, z_name
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.run.ways import Predictor
from mechinterp.progress import progress

ROLES = ("facilitating", "irrelevant", "interfering")
LIMIT = 4.0
"""Gates are sigmoids of logits in [-LIMIT, LIMIT], that is 0.018 to 0.982. A larger limit closes
gates further."""
PRESSURE = 0.01
"""Weight of the gates' logits in the loss, in units of the full model's excess risk. More pressure
opens or closes more heads."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadGates(Result):
    """Gates of all heads: without pressure, with pressure to open, and with pressure to close."""

    COLUMNS: ClassVar = {
        "role": "Largest of the three scores of the head; the scores sum to 1.",
        "facilitating": "Smaller gate of the two pressures: how far the head stays open although pressed to close.",
        "irrelevant": "Difference of the two gates: how far the head follows the pressure.",
        "interfering": "1 minus the larger gate: how far the head stays closed although pressed to open.",
    }
    free: Float[np.ndarray, "layer head"]
    """Gates that minimise the excess risk alone, between 0 and 1."""
    opened: Float[np.ndarray, "layer head"]
    """Gates fitted with a reward for being open, G+."""
    closed: Float[np.ndarray, "layer head"]
    """Gates fitted with a reward for being closed, G-."""
    rise: Float[np.ndarray, "layer head"]
    """Rise of the excess risk when the head alone is masked, unit y^2."""
    rise_sem: Float[np.ndarray, "layer head"]
    full_risk: float
    """Excess risk of the unchanged model, unit y^2."""
    risks: Float[np.ndarray, "3"]
    """Excess risk with the free, the opened and the closed gates, on prompts that were not used in
    the fit."""

    @property
    def scores(self) -> Float[np.ndarray, "role layer head"]:
        """Three scores per head that sum to 1: facilitating (open although pressed to close),
        irrelevant (follows the pressure) and interfering (closed although pressed to open)."""
        low, high = np.minimum(self.opened, self.closed), np.maximum(self.opened, self.closed)
        return np.stack([low, high - low, 1 - high])

    @property
    def roles(self) -> list[str]:
        """Role with the largest score for each head, L0H0 first."""
        return [ROLES[role] for role in self.scores.argmax(0).ravel()]

    def __repr__(self) -> str:
        counts = ", ".join(f"{self.roles.count(role)} {role}" for role in ROLES)
        free, opened, closed = self.risks
        return (
            f"HeadGates({counts}; risk {self.full_risk:.3g}, gated {free:.3g}, "
            f"{opened:.3g} opened, {closed:.3g} closed)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        names = ("free", "opened", "closed", "rise", "rise_sem")
        frame = frame_of(self, *names, **head_axes(self.free)).assign(role=self.roles)
        frame = frame.assign(**{r: s.ravel() for r, s in zip(ROLES, self.scores, strict=True)})
        return frame[["layer", "head", "role", *ROLES, *names]]

    def plot(self) -> go.Figure:
        """Facilitating minus interfering score of each head."""
        title = "Gates: facilitating (1), irrelevant (0), interfering (-1)"
        return heatmaps.heatmap(self.scores[0] - self.scores[2], title=title)


@torch.inference_mode(False)
def learn_gates(
    source: Source,
    prompts: Prompts | None = None,
    *,
    steps: int = 200,
    learning_rate: float = 0.1,
    n_prompts: int = 1024,
    seed: int = 0,
) -> HeadGates:
    """Gates on the heads' outputs that minimise risk / full risk -+ `PRESSURE` times the sum of the
    gates' logits.

    The gates without pressure start open; the other two fits start from them. A head counts as
    irrelevant if closing it, at the other gates, raises the risk by less than 2 LIMIT PRESSURE of
    the full risk. Half of the prompts are used in the fit.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        steps: Number of Adam steps for each of the three fits.
        learning_rate: Learning rate of Adam, on the logits.
    Raises:
        ValueError: If steps is below 1 or there are fewer than four prompts.
    Source:
        Nam et al. 2025, arXiv 2505.13737, causal head gating; the excess risk replaces their
        negative log-likelihood.
        The scores, the pressure and the limit are choices made here.
    See also:
        `prune`, `ablate`.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> prompts = draw_prompts(checkpoint.config.task, 64, generator=generator_for(0, "eval", 0))
        >>> learn_gates(checkpoint.model, prompts, steps=20).roles
        ['facilitating', 'facilitating']
    """
    prompts = evaluation_prompts(
        source, prompts, n_prompts=n_prompts, seed=seed, fitted=len(predictor_of(source).heads)
    )
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}.")
    predictor = predictor_of(source)
    fitted, measured = halves(prompts)
    alone = ablate(predictor, measured, what="heads")
    start = torch.full(
        (predictor.n_layers, predictor.n_heads), LIMIT, dtype=torch.float64, device="cpu"
    )

    def fit(start: Tensor, reward: float, kind: str) -> Tensor:
        told = progress(range(steps), f"fitting gates ({kind})")
        return _fit(predictor, fitted, start, reward, steps=told, learning_rate=learning_rate)

    free = fit(start, 0.0, "free")
    logits = [free, fit(free, PRESSURE, "opened"), fit(free, -PRESSURE, "closed")]
    gates = [torch.sigmoid(one) for one in logits]
    with torch.no_grad():
        risks = [_risk(predictor, measured, gate).item() for gate in gates]
    free_gates, opened, closed = (gate.numpy(force=True) for gate in gates)
    return HeadGates(
        free_gates, opened, closed, alone.rise, alone.rise_sem, alone.full_risk, np.array(risks)
    )


def _fit(
    predictor: Predictor,
    prompts: Prompts,
    start: Tensor,
    reward: float,
    *,
    steps: Iterable[int],
    learning_rate: float,
) -> Tensor:
    """Logits of the gates that minimise risk minus reward times their sum."""
    with torch.no_grad():
        full = _risk(predictor, prompts, torch.ones_like(start))
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=learning_rate)
    chunks = [prompts[begin : begin + CHUNK] for begin in range(0, len(prompts), CHUNK)]
    for step in steps:
        loss = _risk(predictor, chunks[step % len(chunks)], torch.sigmoid(logits)) / full
        optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(loss - reward * logits.sum(), [logits])
        logits.grad = gradient
        optimizer.step()
        with torch.no_grad():
            logits.clamp_(-LIMIT, LIMIT)
    return logits.detach()


def _risk(
    predictor: Predictor, prompts: Prompts, gates: Float[Tensor, "layer head"]
) -> Float[Tensor, ""]:
    """Excess risk with every head's z multiplied by its gate."""

    def gate(z: Tensor, hook: object, *, factors: Tensor) -> Tensor:
        return z * factors.to(z)[:, None]

    hooks: Hooks = [(z_name(at), partial(gate, factors=row)) for at, row in enumerate(gates)]
    with predictor.hooked.model.hooks(fwd_hooks=hooks):
        prediction = predictor.hooked.predict(prompts)
    return (prediction - prompts.y_query_clean).square().mean()
