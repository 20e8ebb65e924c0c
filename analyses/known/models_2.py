"""The hand-made models that version 2 of the suite adds, by name, and the names of its trained ones."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from analyses.known import graphs
from analyses.known.graphs import FULL, Head, S, T, stack, step, turned
from analyses.known.models import ETAS, NOISES, TASK, Made, made
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.config.model import stacked_shapes
from mechinterp.models.constructions import descent
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.constructions.recurrent import recurrent_layer
from mechinterp.models.weights import Weights
from mechinterp.theory.linear import SeparateHeads
from mechinterp.theory.reduced_rank import reduced_rank_coefficient
from mechinterp.training.linear_models import task_moments

SEEDS = (0, 1, 2)
FAMILIES = (
    *("softmax-h2", "softmax-h3", "softmax-h4", "softmax-h8", "tanh-h2", "linear-separate"),
    *("two-tasks-h2", "two-tasks-h4", "shared-tasks-h2", "shared-tasks-h4"),
    *("square-1.0-h2", "affine-1.0-h2", "gla-h1", "gated-delta-h1", "mesa-h1"),
)
"""Trained models of three seeds each."""
LONG = replace(TASK, context_length=60)
"""Task of the models with back-up: one step with eta 1 does nearly all, and the next ones little."""
NOISY = ("preconditioned-2", "redundant-gd-2", "mlp-carry-1", "softmax-stack-2", "backup-gd-2")
SINGULAR = ((1, 2), (1, 3), (1, 4), (2, 3), (2, 4))
"""Rank of the best matrix, and number of heads of rank one, of linear attention at a singular minimum."""
WIDTH = 12
"""Width of the stream of wide models."""
OMEGA, MU = 0.2, 0.6
"""Scores of the softmax heads that take a step in pairs, and of those that smooth."""
GATES = (0.97, 0.7)
TWO_HEADS = (0.06, 0.12)
"""Step of each of two recurrent heads with the gates above."""


def made_2() -> dict[str, Made]:
    """All further hand-made models, by name."""
    plain = dict(_with_mlps()) | dict(_of_several_heads()) | dict(_softmax())
    varied = dict(_varied(made() | plain))
    shaped = {"gd-3": made()["gd-3-rotated"], "wide-gd-2": varied["wide-gd-2"]}
    # Random weights of the shapes of models that hold a variable.
    random = {
        f"random-{name}": Made(graphs.drawn(own.weights, 0.35, seed=6), own.task)
        for name, own in shaped.items()
    }
    return plain | varied | dict(_recurrent()) | random | dict(_singular())


def trained_2() -> tuple[str, ...]:
    """Trained models beyond those of version 1."""
    every = (f"{family}-s{seed}" for family in FAMILIES for seed in SEEDS)
    first = {"softmax-h2-s0", "softmax-h4-s0", "tanh-h2-s0", "linear-separate-s0"}
    return (*(name for name in every if name not in first), "sparse-h4-noise0.1-s1")


def _descent(weights: Weights) -> Made:
    return Made(weights, TASK, "gradient_descent")


def _with_mlps() -> Iterator[tuple[str, Made]]:
    eta = ETAS[0]
    for n in (1, 2):
        layers = [[Head({S: each})] for each in ETAS[:n]]
        yield f"mlp-carry-{n}", _descent(stack(layers, graphs.carrying(), width=FULL))
    halves = [[Head({graphs.Y: -each / 2, S: each / 2})] for each in ETAS[:2]]
    yield "mlp-split-2", _descent(stack(halves, graphs.carrying(), width=FULL))
    one = [[Head({S: eta})]]
    yield "mlp-clip-1", Made(stack(one, graphs.clipping(0.5), width=FULL), TASK)
    with_square = [[Head({graphs.Y: -eta, S: eta})]]
    yield "mlp-square-1", Made(stack(with_square, graphs.squaring(), width=FULL), TASK)
    factors = [[Head({S: eta}, (1.0, 1.0, 0.0, 0.0)), Head({T: eta}, (0.0, 0.0, 1.0, 1.0))]]
    yield "mlp-product-1", Made(stack(factors, graphs.multiplying(), width=FULL), TASK)
    for n in (1, 2):
        two = [[Head({S: each}), Head({T: each})] for each in ETAS[:n]]
        yield f"mlp-max-{n}", _descent(stack(two, graphs.larger(), width=FULL))
        yield f"mlp-min-{n}", _descent(stack(two, graphs.smaller(), width=FULL))
    for name, last in (("backup-or", graphs.either()), ("joint-and", graphs.both())):
        yield name, _descent(stack([two[0], []], graphs.sorting(), last, width=FULL))


SHARES = {
    "redundant-gd-1": (1, (1 / 3, 1 / 3, 1 / 3)),
    "redundant-gd-2": (2, (0.5, 0.5)),
    "redundant-gd-2-uneven": (2, (0.9, 0.1)),
    "redundant-gd-3": (3, (0.5, 0.5)),
    "opposed-gd-1": (1, (4.0, -3.0)),
    "opposed-gd-2": (2, (3.0, -2.0)),
    "opposed-gd-2-three": (2, (2.0, -1.5, 0.5)),
}
"""Number of layers, and the part of a step that each head of a layer takes."""


def _of_several_heads() -> Iterator[tuple[str, Made]]:
    for name, (n, shares) in SHARES.items():
        yield name, _descent(stack([[step(share * eta) for share in shares] for eta in ETAS[:n]]))
    for n in (2, 3):
        weights = stack([[step(1.0)]] * n)
        yield f"backup-gd-{n}", Made(weights, LONG, "gradient_descent")


def _softmax() -> Iterator[tuple[str, Made]]:
    """Softmax with scores +-omega <x_k, x_l> averages y nearly as 1 + omega <x_k, x_l>: two heads of opposite signs take a
    step."""
    for n in (2, 3):
        pairs = [
            [
                Head({graphs.Y: -sign * eta / (2 * OMEGA)}, (sign * OMEGA,) * graphs.D_X)
                for sign in (1, -1)
            ]
            for eta in ETAS[:n]
        ]
        yield f"softmax-stack-{n}", Made(stack(pairs, score="softmax"), TASK)
    smooth = [[Head({graphs.Y: -1.0}, (MU,) * graphs.D_X)]] * 2
    yield "softmax-kernel-2", Made(stack(smooth, score="softmax"), TASK)


def _varied(plain: dict[str, Made]) -> Iterator[tuple[str, Made]]:
    for name in ("mlp-carry-2", "redundant-gd-2", "softmax-stack-2", "backup-gd-2", "backup-or"):
        own = plain[name]
        yield f"{name}-rotated", replace(own, weights=turned(own.weights, seed=1))
    for name in NOISY:
        for noise in NOISES:
            own = plain[name]
            noisy = descent.with_noise(turned(own.weights, seed=3), noise, seed=4)
            yield f"{name}-noise-{noise:g}", replace(own, weights=noisy, components=None)
    for name in ("gd-2", "gd-3", "gd-plus-plus-2"):
        weights = graphs.wide(plain[name].weights, WIDTH, seed=5)
        yield f"wide-{name}", replace(plain[name], weights=weights, components=None)


def _recurrent() -> Iterator[tuple[str, Made]]:
    layer, settings = recurrent_layer, {"d_x": TASK.d_x}
    for score, label, given in (
        ("gated", "forgetting_gd", {"alpha": 0.9}),
        ("delta", "online_gd", {"eta": 0.15}),
        ("gated_delta", "online_gd", {"alpha": 0.95, "eta": 0.15}),
        ("mesa", "recursive_least_squares", {"alpha": 0.9}),
    ):
        name = f"recurrent-{score.replace('_', '-')}"
        yield name, Made(layer(score, **settings, **given).copied(), TASK, label)
    yield "recurrent-gated-two-heads", Made(_gated([GATES]), TASK)
    yield "recurrent-gated-stack", Made(_gated([GATES[:1], GATES[1:]]), TASK)


def _gated(gates: list[tuple[float, ...]]) -> Weights:
    """Layers of descent with forgetting on what earlier layers leave; each gate is a head."""
    n_layers, n_heads, width = len(gates), len(gates[0]), graphs.NARROW
    model = ModelConfig(
        n_layers=n_layers, n_heads=n_heads, d_head=width, d_model=width, score="gated"
    )
    # The same heads as those of attention, whose tensors have the same names.
    like = stack([[step(eta) for eta in TWO_HEADS[:n_heads]]] * n_layers)
    tensors = {n: like.tensors[n] for n in stacked_shapes(model, TASK.d_x, 1) if n in like.tensors}
    tensors["attn.b_gate"] = torch.tensor(gates, dtype=torch.float64).logit()
    return Weights(model, TASK.d_x, 1, tensors, like.scale)


def _singular() -> Iterator[tuple[str, Made]]:
    """Linear attention on a pool of so few task vectors that heads are left over, whose keys and queries are 0."""
    for rank, n_heads in SINGULAR:
        task = TaskConfig(d_x=4, context_length=31, noise_var=0.0, n_tasks=rank)
        left, values, right = np.linalg.svd(task_moments(task).minimiser())
        K, Q = np.zeros((2, n_heads, 1, task.d_x))
        K[:rank, 0] = (left[:, :rank] * np.sqrt(values[:rank])).T
        Q[:rank, 0] = np.sqrt(values[:rank])[:, None] * right[:rank]
        weights = linear_attention(SeparateHeads(v=np.ones(n_heads), K=K, Q=Q))
        exact = reduced_rank_coefficient(task.d_x, task.d_x, n_hidden=n_heads, rank=rank)
        name = f"singular-rank{rank}-h{n_heads}"
        yield name, Made(weights.to(torch.float64).copied(), task, coefficient=exact)
