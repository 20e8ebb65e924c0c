"""Algorithms that take the pairs of a prompt one after another, so that their answer depends on the order of the pairs.

Pairs (x_1, y_1) ... (x_L, y_L) come in their order, from w = 0; a pair's age is the number of pairs after it. Each
algorithm is a function of moments and scalars, as those in `icl.algorithms` are, without a path over layers.
`moments.scale` is the number of pairs relative to the model's own length if sums over pairs are divided by that fixed
length; else 1.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.algorithm import (
    Algorithm,
    PromptMoments,
    Scalar,
    fixed,
    part_of_inverse_curvature,
    usual_penalty,
)
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import chunks

_CACHED = 2**20
"""Bytes of the largest tensor of a few prompts that are computed at once, so that it stays in a cache of the processor."""
_SMALLEST_GATE = 1e-3
"""Lower bound of a factor per pair in fits."""


def _faded(factor: Tensor, n_pairs: int) -> Float[Tensor, " n_pairs"]:
    """factor^age of each pair."""
    ages = torch.arange(n_pairs - 1, -1, -1, dtype=torch.float64, device=factor.device)
    return factor.reshape(()) ** ages


def _forgetting(moments: PromptMoments, n_layers: int, eta: Tensor, alpha: Tensor) -> Tensor:
    """(eta / L) sum_l alpha^age y_l <x_l, x_query>: one layer of gated linear attention."""
    prompts, n_pairs = moments.prompts, moments.context_length
    weights = _faded(alpha, n_pairs) * (prompts.x @ prompts.x_query[..., None])[..., 0]
    summed = (weights[:, None] @ prompts.y)[:, 0]
    return (eta * moments.scale / n_pairs * summed).expand(n_layers, -1, -1)


def _online(
    moments: PromptMoments, n_layers: int, eta: Tensor, gate: Tensor, norm: Tensor
) -> Tensor:
    """w <- gate w + s_l x_l (y_l - gate <w, x_l>) with s_l = eta / (1 + norm |x_l|^2).

    The errors e_l = y_l - sum_{m < l} gate^(l - m) s_m <x_l, x_m> e_m solve a triangular system, so that no loop over the
    pairs is needed: w = sum_l gate^age s_l x_l e_l.
    """
    n_pairs = moments.context_length
    places = torch.arange(n_pairs, dtype=torch.float64, device=eta.device)
    faded = gate.reshape(()) ** (places[:, None] - places).clamp(min=0)
    identity = torch.eye(n_pairs, dtype=torch.float64, device=eta.device)

    def predicted(prompts: Prompts) -> Tensor:
        x = prompts.x
        steps = eta / (1 + norm * x.square().sum(-1))
        mixed = (faded * (x @ x.mT) * steps[:, None]).tril(-1)
        errors = torch.linalg.solve_triangular(identity + mixed, prompts.y, upper=False)
        similarity = (x @ prompts.x_query[..., None])[..., 0]
        weights = _faded(gate, n_pairs) * steps * similarity
        return (weights[:, None] @ errors)[:, 0]

    return _by_chunks(predicted, moments.prompts, 8 * n_pairs**2).expand(n_layers, -1, -1)


def _recursive(moments: PromptMoments, n_layers: int, alpha: Tensor, penalty: Tensor) -> Tensor:
    """argmin_w sum_l alpha^age (y_l - <w, x_l>)^2 + penalty |w|^2: a mesa layer.

    With sums over a fixed length L_0 the penalty of longer prompts is alpha^(L - L_0) penalty: that of the recursion of
    textbooks, which starts from P = I / penalty_0 and has the penalty alpha^L penalty_0 after L pairs.
    """
    n_pairs, d_x = moments.prompts.x.shape[1:]
    faded = _faded(alpha, n_pairs)[:, None]
    more = n_pairs - n_pairs / moments.scale
    identity = torch.eye(d_x, dtype=torch.float64, device=alpha.device)
    ridge = penalty * alpha**more * identity

    def predicted(prompts: Prompts) -> Tensor:
        weighted = prompts.x * faded
        w = torch.linalg.solve(weighted.mT @ prompts.x + ridge, weighted.mT @ prompts.y)
        return (prompts.x_query[:, None] @ w)[:, 0]

    n_bytes = 8 * d_x * max(n_pairs, d_x)
    return _by_chunks(predicted, moments.prompts, n_bytes).expand(n_layers, -1, -1)


def _by_chunks(
    predicted: Callable[[Prompts], Tensor], prompts: Prompts, n_bytes: int
) -> Float[Tensor, "batch d_y"]:
    """Predictions for a few prompts at a time; `n_bytes` is the size of the largest tensor of one prompt."""
    size = max(1, _CACHED // max(1, n_bytes))
    return torch.cat([predicted(prompts[rows]) for rows in chunks(len(prompts), size)])


def _scalar(name: str, start: float, lower: float = 0.0) -> Scalar:
    return Scalar(name, fixed(start), where="once", lower=lower)


ALONG_PAIRS = (
    Algorithm(
        "descent with forgetting",
        "forgetting_gd",
        (_scalar("eta", 1.0), _scalar("alpha", 0.95, _SMALLEST_GATE)),
        _forgetting,
        has_path=False,
        along_pairs=True,
        contains="gradient_descent",
    ),
    Algorithm(
        "online descent",
        "online_gd",
        (
            Scalar("eta", part_of_inverse_curvature(0.5), where="once"),
            _scalar("gate", 0.99, _SMALLEST_GATE),
            Scalar("norm", part_of_inverse_curvature(0.1), where="once"),
        ),
        _online,
        has_path=False,
        along_pairs=True,
    ),
    Algorithm(
        "recursive least squares",
        "recursive_least_squares",
        (
            _scalar("alpha", 0.97, _SMALLEST_GATE),
            Scalar("penalty", usual_penalty, where="once", lower=1e-9),
        ),
        _recursive,
        has_path=False,
        along_pairs=True,
        contains="ridge_like",
    ),
)
"""Algorithms along the pairs. `online_gd` is one label for LMS (gate 1, norm 0), its normed form (norm above 0) and the
gated delta rule (gate below 1)."""
