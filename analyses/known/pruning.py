"""Edge pruning: a learned mask over edges (Bhaskar et al. 2024, arXiv 2406.16778).

A run on the clean prompts, in which edge e carries z_e times its own value and 1 - z_e times that of the corrupted run, is
trained to predict as the full model does while the share of cut edges grows to a target. z is drawn from a hard concrete
distribution of logits. The authors take one circuit, the edges that are kept at the target. Scores need an order of all edges:
it is the mean of z over training, so that an edge that is cut later ranks higher.

Settings are those of the authors' script for compiled models (720 steps, of which the target grows over 640 and the step size
over 96; target 0.92), with the step sizes of their script for GPT-2 (0.8 for logits and for the two Lagrange multipliers). For
regression, their KL divergence to the full model becomes the squared distance to its prediction, over that of the corrupted run."""

from functools import partial
from typing import Any

import torch
from einops import einsum
from torch import Tensor

from analyses.known.gradients import Answer, own_inputs, pair_of
from mechinterp.analysis.patching.pairing import InputPair, hooks_of, written_at
from mechinterp.known import Entry

STEPS, GROWING, WARMING = 720, 640, 96
"""Number of steps; steps over which the target grows; steps over which the step size grows. It then falls to 0."""
TARGET = 0.92
"""Share of edges that are cut in the end."""
STEP_SIZE = 0.8
START, SPREAD = 10.0, 0.01
"""Mean and standard deviation of the logits at the start."""
LEAST_EDGES = 100
"""Smallest number of edges that are pruned: with fewer, the target leaves less than eight."""
LEFT, RIGHT, TEMPERATURE = -0.1, 1.1, 2 / 3
"""The hard concrete distribution: a stretched sigmoid, clipped to 0 and 1."""
TINY = 1e-6


def edge_pruning(entry: Entry, *, seed: int = 0, steps: int = STEPS) -> Answer:
    """Part of each edge that is kept, mean over training."""
    pair, generator = pair_of(entry), torch.Generator().manual_seed(seed)
    masked = MaskedRun(pair)
    n_edges = int(pair.edges.sum())
    start = START + SPREAD * torch.randn(n_edges, generator=generator, dtype=torch.float64)
    logits = start.requires_grad_()
    multipliers = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW(
        [{"params": [logits]}, {"params": [multipliers], "maximize": True}], lr=STEP_SIZE
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(share_of_step, steps=steps))
    total = torch.zeros(n_edges, dtype=torch.float64)
    with own_inputs(pair.hooked.model), torch.enable_grad():
        for step in range(steps):
            uniform = torch.rand(n_edges, generator=generator, dtype=torch.float64)
            kept = hard_concrete(uniform.clamp(TINY, 1 - TINY), logits)
            away = 1 - kept.mean() - TARGET * min(1, step / (GROWING * steps / STEPS))
            loss = masked.distance(kept) + multipliers[0] * away + multipliers[1] * away**2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += kept.detach()
    return {"aim": "out", "edges": (total / steps).numpy()}


def edge_pruning_of_large(entry: Entry) -> Answer:
    """Edge pruning of a model with at least `LEAST_EDGES` edges; no answer for others."""
    return edge_pruning(entry) if len(entry.edges()) >= LEAST_EDGES else {}


def share_of_step(step: int, *, steps: int) -> float:
    """Step size over its largest: a linear rise and a linear fall."""
    warming = WARMING * steps / STEPS
    return min((step + 1) / warming, (steps - step) / (steps - warming))


def hard_concrete(uniform: Tensor, logits: Tensor) -> Tensor:
    stretched = ((uniform.logit() + logits) / TEMPERATURE).sigmoid() * (RIGHT - LEFT) + LEFT
    return stretched.clamp(0, 1)


class MaskedRun:
    """Run on the clean prompts in which every edge carries a part of its value on the corrupted ones."""

    def __init__(self, pair: InputPair) -> None:
        self.pair, self.writing = pair, hooks_of(pair.senders)
        self.model: Any = pair.hooked.model
        with torch.no_grad():
            output, cache = pair.hooked.run_noting(pair.corrupted, self.writing)
            self.corrupted = {n: written_at(self.model, n, cache[n]) for n in self.writing}
            self.scale = pair.metric(output).mean().abs()
        self.edges = torch.from_numpy(pair.edges)
        self.readers: dict[str, list[int]] = {}
        for index, node in enumerate(pair.receivers):
            self.readers.setdefault(node.own_input, []).append(index)

    def distance(self, kept: Tensor) -> Tensor:
        """Mean squared distance to the full prediction, over that of the corrupted run.

        Args:
            kept: Part of each edge that is kept, [edge].
        """
        cut = torch.zeros(self.edges.shape, dtype=kept.dtype).masked_scatter(self.edges, 1 - kept)
        changes: list[Tensor] = []

        def note(values: Tensor, hook: object, *, name: str) -> Tensor:
            changes.append(self.corrupted[name] - written_at(self.model, name, values))
            return values

        def shift(own: Tensor, hook: object, *, receivers: list[int]) -> Tensor:
            if not changes:
                return own
            change = torch.cat(changes, 2)
            part = cut[: change.shape[2], receivers].to(own)
            more = einsum(change, part, "n pos sender d, sender reader -> n pos reader d")
            return own + (more if own.ndim == 4 else more[:, :, 0])

        hooks: list[tuple] = [(name, partial(note, name=name)) for name in self.writing]
        hooks += [(n, partial(shift, receivers=each)) for n, each in self.readers.items()]
        return -self.pair.metric(self.pair.hooked.run(self.pair.clean, hooks)).mean() / self.scale
