"""Linear attention built by hand to run a known algorithm: one head per layer, float64.

The stream is [x | y]. Before layer l the y slot of token k is y_k - <w_l, x_k>. For the query it starts at 0, and the
prediction after any layer is its negative. No token reads the query.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import generator_for
from mechinterp.models.constructions.stack import stack_of_layers
from mechinterp.models.weights import Weights


def gradient_descent_model(etas: Sequence[float], *, d_x: int) -> Weights:
    """Model that takes one step of gradient descent per layer.

    Args:
        etas: Step size of each layer, unit 1/x^2.
    Source:
        von Oswald et al. 2023, arXiv 2212.07677; their construction with the sign of y reversed.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> from mechinterp.icl.sparse_predictors import gradient_descent
        >>> from mechinterp.models.run.general import predict_deep
        >>> task, generator = TaskConfig(d_x=4), generator_for(0, "eval", 0)
        >>> prompts = draw_prompts(task, 8, generator=generator, dtype=torch.float64)
        >>> expected = gradient_descent(prompts, steps=2, eta=0.5)[-1]
        >>> predicted = predict_deep(gradient_descent_model([0.5, 0.5], d_x=4), prompts)
        >>> torch.allclose(predicted, expected)
        True
    """
    return gd_plus_plus_model(etas, [0.0] * len(etas), d_x=d_x)


def gd_plus_plus_model(etas: Sequence[float], gammas: Sequence[float], *, d_x: int) -> Weights:
    """Model of GD++: every layer takes a step of gradient descent and maps x to (1 - gamma_l S_l) x.

    Args:
        etas: Step size of each layer, unit 1/x^2.
        gammas: One number per layer, unit 1/x^2; the last one changes no prediction.
    Raises:
        ValueError: If etas is empty, or etas and gammas differ in length.
    Source:
        von Oswald et al. 2023, arXiv 2212.07677.
    """
    _require_as_many(etas, "gammas", gammas)
    identity = torch.eye(d_x, dtype=torch.float64, device="cpu")
    return _descending([identity] * len(etas), etas, gammas)


def preconditioned_gd_model(
    etas: Sequence[float], cs: Sequence[float], *, covariance: Float[Tensor, "d_x d_x"]
) -> Weights:
    """Model of preconditioned gradient descent: a step with the preconditioner eta_l (Sigma + c_l I)^-1 per layer.

    Args:
        etas: Step size of each layer; no unit.
        cs: One number per layer, unit x^2.
        covariance: Sigma, which is built into the weights.
    Raises:
        ValueError: If etas is empty, or etas and cs differ in length.
    Source:
        Ahn et al. 2023, arXiv 2306.00297, with this form of the matrices.
    """
    _require_as_many(etas, "cs", cs)
    identity = torch.eye(len(covariance), dtype=torch.float64, device="cpu")
    inverses = [torch.linalg.inv(covariance.double() + c * identity) for c in cs]
    return _descending(inverses, etas, [0.0] * len(etas))


def rotated(weights: Weights, *, seed: int) -> Weights:
    """Equivalent model, with the same predictions, in a random basis of its stream."""
    R = rotation(weights.d_model, seed=seed).to(weights.W_Q)
    W_in, W_U = weights.reading
    sides = {f"attn.{name}": R.mT @ getattr(weights, name) for name in ("W_Q", "W_K", "W_V")}
    reading = {"W_in": W_in @ R, "unembed.W_U": R.mT @ W_U}
    tensors = {**sides, "attn.W_O": weights.W_O @ R, **reading}
    return replace(weights, model=replace(weights.model, d_model=weights.d_model), tensors=tensors)


def rotation(width: int, *, seed: int) -> Float[Tensor, "d_model d_model"]:
    """The orthogonal matrix R of `rotated`: a vector v of the stream becomes v R. In float64."""
    generator = generator_for(seed, "init", 0)
    drawn = torch.randn(width, width, generator=generator, dtype=torch.float32, device="cpu")
    return torch.linalg.qr(drawn.double()).Q


def with_noise(weights: Weights, relative: float, *, seed: int) -> Weights:
    """Copy with Gaussian noise on every matrix, `relative` times the root mean square of its entries.

    Heads that are zero stay zero.

    Raises:
        ValueError: If relative is negative.
    """
    if relative < 0:
        raise ValueError(f"relative must be >= 0, got {relative}.")
    generator, noisy = generator_for(seed, "init", 0), {}
    for name, tensor in weights.tensors.items():
        size = relative * tensor.square().mean((-2, -1), keepdim=True).sqrt()
        noisy[name] = tensor + size * torch.randn(
            tensor.shape, generator=generator, dtype=torch.float32, device="cpu"
        ).to(tensor)
    return weights.with_tensors(noisy)


def _require_as_many(etas: Sequence[float], name: str, values: Sequence[float]) -> None:
    if not etas or len(etas) != len(values):
        raise ValueError(
            f"etas and {name} must have one number per layer, got {len(etas)} and {len(values)}."
        )


def _descending(
    preconditioners: Sequence[Tensor], etas: Sequence[float], gammas: Sequence[float]
) -> Weights:
    """Heads with scores <x_k, A x_l> that read x and y, and write -gamma times x and -eta times y."""
    n_layers, d_x = len(preconditioners), len(preconditioners[0])
    width = d_x + 1
    identity = torch.eye(width, dtype=torch.float64, device="cpu")
    W_Q = torch.zeros(n_layers, 1, width, width, dtype=torch.float64, device="cpu")
    W_K, W_O = W_Q.clone(), W_Q.clone()
    # Undoes the division of the scores by sqrt(d_head).
    W_Q[:, 0, :d_x, :d_x] = torch.stack(list(preconditioners)) * width**0.5
    W_K[:, :, :d_x, :d_x] = identity[:d_x, :d_x]
    for layer, (eta, gamma) in enumerate(zip(etas, gammas, strict=True)):
        steps = [gamma] * d_x + [eta]
        W_O[layer, 0] = -torch.tensor(steps, dtype=torch.float64, device="cpu").diag()
    W_V = identity.expand_as(W_Q).clone()
    settings = {"scale": width**-0.5, "reading": (identity, -identity[:, d_x:])}
    return stack_of_layers(W_Q, W_K, W_V, W_O, d_y=1, score="linear/L", **settings)
