"""Control learners, which are compared with the algorithms of `icl.algorithms` and give no label themselves.

If a control explains a model better than an algorithm, the model does not get the algorithm's label. Linearity in y and
rotation equivariance are not stated for controls; only algorithms with a label are tested for them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mechinterp.icl.algorithm import Algorithm, Scalar, filtered, iterated, without_path
from mechinterp.icl.algorithms import ALGORITHMS, ETA, SHRINKING
from mechinterp.icl.predictors import nearest_neighbours, ridge, zero_prediction
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.sparse_predictors import averaging

NEIGHBOURS = 3
DEGREE = 6
"""Number of coefficients of the largest polynomial."""
LEAST_STEP = 1e-12
"""Lower bound on a denominator that vanishes with the gradient."""


def _momentum(
    moments: PromptMoments, n_layers: int, eta: Tensor, beta: Tensor, *, ahead: bool
) -> Tensor:
    """Heavy ball, or with `ahead` Nesterov's method, which takes the gradient after the momentum step."""
    s = moments.eigenvalues
    phi = [torch.zeros_like(s), torch.zeros_like(s)]
    for layer in range(n_layers):
        moved = phi[-1]
        if layer > 0:
            moved = moved + beta * (phi[-1] - phi[-2])
        phi.append(moved + eta[layer] * (1 - s * (moved if ahead else phi[-1])))
    return filtered(moments, phi[2:])


def _decay_step(
    moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor, decay: Tensor
) -> Tensor:
    return (1 - decay) * w + eta * gradient


def _centred(moments: PromptMoments, n_layers: int, eta: Tensor) -> Tensor:
    return ALGORITHMS[0].run(moments.centred, n_layers, eta)


def _curvature_step(moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor) -> Tensor:
    return w + eta / moments.eigenvalues[:, -1, None, None] * gradient


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


def _searched_step(moments: PromptMoments, w: Tensor, gradient: Tensor) -> Tensor:
    curvature = _inner(gradient, moments.S @ gradient).clamp(min=LEAST_STEP)
    return w + _inner(gradient, gradient) / curvature * gradient


def _conjugate_gradients(moments: PromptMoments, n_layers: int) -> Tensor:
    directions: list[Tensor] = []

    def update(layer: int, w: Tensor, gradient: Tensor) -> Tensor:
        # Conjugate to the last direction, which implies conjugate to all earlier ones.
        p = gradient
        if directions:
            last = directions[-1]
            curvature = _inner(last, moments.S @ last).clamp(min=LEAST_STEP)
            p = gradient - _inner(last, moments.S @ gradient) / curvature * last
        directions.append(p)
        return w + _inner(p, gradient) / _inner(p, moments.S @ p).clamp(min=LEAST_STEP) * p

    return iterated(moments, n_layers, update)


def _hard_step(moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor) -> Tensor:
    kept = moments.task.sparsity or max(1, moments.task.d_x // 2)
    stepped = w + eta * gradient
    least = stepped.abs().topk(kept, dim=1).values[:, -1:]
    return stepped * (stepped.abs() >= least)


def _between_step(
    moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor, t: Tensor, power: Tensor
) -> Tensor:
    """An entry u above t becomes u (1 - (t / |u|)^power); soft thresholding for power 1, hard for large powers."""
    stepped = w + eta * gradient
    return stepped * (1 - (t / torch.maximum(stepped.abs(), t).clamp(min=LEAST_STEP)) ** power)


def _elastic_step(
    moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor, t: Tensor, decay: Tensor
) -> Tensor:
    stepped = w + eta * gradient
    return stepped.sign() * torch.relu(stepped.abs() - t) / (1 + decay * t)


def _least_mean_squares(moments: PromptMoments, n_layers: int, eta: Tensor) -> Tensor:
    x, y = moments.prompts.x, moments.prompts.y
    w, path = torch.zeros_like(moments.b), []
    for _ in range(n_layers):
        for k in range(x.shape[1]):
            rest = y[:, k, None] - x[:, k, None] @ w
            w = w + eta * x[:, k, :, None] * rest
        path.append((moments.prompts.x_query[:, None] @ w)[:, 0])
    return torch.stack(path)


def _forgetting(moments: PromptMoments, n_layers: int, rate: Tensor, penalty: Tensor) -> Tensor:
    """Recursive least squares in which a pair has exp(-rate) times the weight of the next pair."""
    x, y = moments.prompts.x, moments.prompts.y
    age = torch.arange(x.shape[1] - 1, -1, -1, dtype=x.dtype, device=x.device)
    weighted = x.mT * (-rate * age).exp()
    identity = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    w = torch.linalg.solve(weighted @ x + penalty * identity, weighted @ y)
    return (moments.prompts.x_query[:, None] @ w)[:, 0].expand(n_layers, -1, -1)


def _centred_ridge(moments: PromptMoments, n_layers: int, penalty: Tensor) -> Tensor:
    """Ridge regression with an unpenalised intercept."""
    centred, prompts = moments.centred, moments.prompts
    identity = torch.eye(centred.S.shape[1], dtype=centred.S.dtype, device=centred.S.device)
    w = torch.linalg.solve(centred.S + penalty / moments.n_pairs[..., None] * identity, centred.b)
    query = prompts.x_query[:, None] - prompts.x.mean(1, keepdim=True)
    return (prompts.y.mean(1) + (query @ w)[:, 0]).expand(n_layers, -1, -1)


def _components(moments: PromptMoments, n_layers: int) -> Tensor:
    """Least squares without the eigenvector of the smallest eigenvalue."""
    phi = 1 / moments.eigenvalues.clamp(min=LEAST_STEP)
    return filtered(moments, [phi * (torch.arange(phi.shape[1], device=phi.device) > 0)] * n_layers)


def _polynomials(moments: PromptMoments, n_layers: int, *coefficients: Tensor) -> Tensor:
    s, phi = moments.eigenvalues, []
    for layer in range(n_layers):
        powers = [c[layer - k] * s**k for k, c in enumerate(coefficients) if k <= layer]
        phi.append(torch.stack(powers).sum(0))
    return filtered(moments, phi)


def _coefficient(power: int) -> Scalar:
    return Scalar(
        f"c{power}",
        lambda moments: moments.curvature ** -(power + 1),
        where=f"from layer {power}",
        lower=-torch.inf,
    )


_BETA = Scalar("beta", lambda moments: 0.3, where="once", lower=-torch.inf)
_PENALTY = Scalar("penalty", lambda moments: moments.penalty or 0.1, where="once", lower=1e-9)

_PATHLESS: dict[str, Callable[[PromptMoments], Tensor]] = {
    "zero": lambda moments: zero_prediction(moments.prompts),
    "averaging": lambda moments: averaging(moments.prompts),
    "posterior mean of a dense prior": lambda moments: ridge(
        moments.prompts, penalty=moments.penalty
    ),
    "nearest neighbours": lambda moments: nearest_neighbours(moments.prompts, count=NEIGHBOURS),
}

CONTROLS = (
    Algorithm("heavy ball", None, (ETA, _BETA), partial(_momentum, ahead=False)),
    Algorithm("Nesterov's descent", None, (ETA, _BETA), partial(_momentum, ahead=True)),
    Algorithm(
        "descent with weight decay",
        None,
        (ETA, Scalar("decay", lambda moments: 0.1, where="once", lower=-torch.inf)),
        step=_decay_step,
        by_mode=True,
    ),
    Algorithm("centred descent", None, (ETA,), _centred),
    Algorithm(
        "descent by the largest eigenvalue",
        None,
        (Scalar("eta", lambda moments: 1.0),),
        step=_curvature_step,
        by_mode=True,
    ),
    Algorithm("line search", None, (), step=_searched_step),
    Algorithm("conjugate gradients", None, (), _conjugate_gradients),
    Algorithm("hard thresholding", None, (ETA,), step=_hard_step),
    Algorithm(
        "shrinkage between soft and hard",
        None,
        (*SHRINKING, Scalar("power", lambda moments: 2.0, where="once", lower=1.0)),
        step=_between_step,
    ),
    Algorithm(
        "proximal steps of the elastic net",
        None,
        (*SHRINKING, Scalar("decay", lambda moments: 0.5, where="once")),
        step=_elastic_step,
    ),
    Algorithm(
        "a polynomial of S in each layer",
        None,
        tuple(_coefficient(power) for power in range(DEGREE)),
        _polynomials,
        linear_in_scalars=True,
    ),
    Algorithm("principal component regression", None, (), _components, has_path=False),
    Algorithm("ridge with an intercept", None, (_PENALTY,), _centred_ridge, has_path=False),
    *(
        Algorithm(name, None, (), without_path(learner), has_path=False)
        for name, learner in _PATHLESS.items()
    ),
)
"""Controls that use all pairs at once, and reference curves."""
ONLINE = (
    Algorithm(
        "least mean squares",
        None,
        (Scalar("eta", lambda m: 0.5 / m.curvature / m.context_length, where="once"),),
        _least_mean_squares,
    ),
    Algorithm(
        "recursive least squares with forgetting",
        None,
        (Scalar("rate", lambda moments: 1 / moments.context_length, where="once"), _PENALTY),
        _forgetting,
        has_path=False,
    ),
)
"""Controls that process one pair after another, so that the order of the pairs matters."""
OF_ANY_DEPTH = tuple(
    each
    for each in (*ALGORITHMS, *CONTROLS)
    if each.has_path and all(scalar.where == "once" for scalar in each.scalars)
)
"""Algorithms and controls whose number of scalars does not grow with the layers: a function may use any number of steps."""
