"""Closed-form learners with a model's signature: prompts in, predictions [batch, d_y] out, unit y."""

from dataclasses import replace

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import CHUNK_BYTES, chunks


def zero_prediction(prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Constant prediction 0, the best prediction without a context.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> zero_prediction(prompts).any()
        tensor(False)
    """
    return torch.zeros_like(prompts.y_query)


def vanilla_gd(prompts: Prompts, *, eta: float) -> Float[Tensor, "batch d_y"]:
    """One step of gradient descent from zero: (eta/L) sum_l y_l <x_l, x_query>.

    Args:
        eta: Step size on the loss (1/2L) sum_l (y_l - <beta, x_l>)^2; unit 1/x^2.
    Source:
        He et al. 2025, arXiv 2503.12734, (D.28).
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(vanilla_gd(prompts, eta=0.86).shape)
        (8, 1)
    """
    similarity = einsum(prompts.x, prompts.x_query, "batch context d_x, batch d_x -> batch context")
    return _read(prompts, similarity) * (eta / prompts.x.shape[1])


def debiased_gd(prompts: Prompts, *, eta: float) -> Float[Tensor, "batch d_y"]:
    """One gradient step on centred covariates: (eta/L) sum_l y_l <x_l - mean(x), x_query>.

    Args:
        eta: Step size; unit 1/x^2.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.11), factor 1/L.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(debiased_gd(prompts, eta=0.88).shape)
        (8, 1)
    """
    return vanilla_gd(replace(prompts, x=prompts.x - prompts.x.mean(1, keepdim=True)), eta=eta)


def ridge(prompts: Prompts, *, penalty: float) -> Float[Tensor, "batch d_y"]:
    """Ridge regression <(X X^T + penalty I)^-1 X y, x_query>.

    With penalty = noise_var / beta_var it is the Bayes predictor of a Gaussian task, for any covariance of x.

    Args:
        penalty: Number added to the diagonal of X X^T; unit x^2. With 0 it is least squares of minimal norm.
    Raises:
        ValueError: If penalty is negative.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> error = ridge(prompts, penalty=0.1 / 0.2) - prompts.y_query_clean
        >>> error.square().mean().item() < 0.1
        True
    """
    if penalty < 0:
        raise ValueError(f"penalty must be >= 0, got {penalty}.")
    gram = prompts.x.mT @ prompts.x
    moment = prompts.x.mT @ prompts.y
    if penalty == 0:
        # pinv makes about six arrays of the size of x.
        size = 6 * prompts.x[0].numel() * prompts.x.element_size()
        parts = chunks(len(prompts), max(1, CHUNK_BYTES // size))
        beta = torch.cat([torch.linalg.pinv(prompts.x[r]) @ prompts.y[r] for r in parts])
    else:
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        beta = torch.linalg.solve(gram + penalty * identity, moment)
    return einsum(beta, prompts.x_query, "batch d_x d_y, batch d_x -> batch d_y")


def ridge_at_every(prompts: Prompts, *, penalty: float) -> Float[Tensor, "batch n_pairs d_y"]:
    """`ridge` for every x of a prompt, from the 0 to L pairs before it.

    Second moments are cumulative sums over the pairs.

    Raises:
        ValueError: If penalty is negative.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, dtype=torch.float64)
        >>> every = ridge_at_every(prompts, penalty=0.5)
        >>> torch.allclose(every[:, 7], ridge(prompts.prefix(7), penalty=0.5))
        True
    """
    if penalty <= 0:
        # Least squares of minimal norm has no inverse of a sum for fewer pairs than coordinates.
        lengths = range(1, prompts.x.shape[1] + 1)
        first = torch.zeros_like(prompts.y_query)
        each = [ridge(prompts.prefix(length), penalty=penalty) for length in lengths]
        return torch.stack([first, *each], dim=1)
    size = CHUNK_BYTES // (prompts.x[0].numel() * prompts.x.shape[2] * prompts.x.element_size())
    parts = chunks(len(prompts), max(1, size))
    return torch.cat([_ridge_at_every(prompts[rows], penalty) for rows in parts])


def _ridge_at_every(prompts: Prompts, penalty: float) -> Float[Tensor, "batch n_pairs d_y"]:
    x, y = prompts.x, prompts.y
    gram, moment = ((x[..., None] * other[:, :, None]).cumsum(1) for other in (x, y))
    gram, moment = (pad(sums, (0, 0, 0, 0, 1, 0)) for sums in (gram, moment))
    identity = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    beta = torch.linalg.solve(gram + penalty * identity, moment)
    return einsum(beta, prompts.every_x, "batch n d_x d_y, batch n d_x -> batch n d_y")


def nadaraya_watson(
    prompts: Prompts, *, omega: float | Float[Tensor, " d_x"], mu: float | Float[Tensor, " d_y"]
) -> Float[Tensor, "batch d_y"]:
    """Kernel smoother: mu sum_l p_l y_l with p = softmax_l(<omega x_l, x_query>).

    Args:
        omega: Scale of the exponent, a number or one number per coordinate; unit 1/x^2.
        mu: Factor on the average, a number or one number per response.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.12).
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> mean = nadaraya_watson(prompts, omega=0.0, mu=1.0)
        >>> torch.allclose(mean, prompts.y.mean(1))
        True
    """
    scores = einsum(
        prompts.x, prompts.x_query * omega, "batch context d_x, batch d_x -> batch context"
    )
    return mu * _read(prompts, torch.softmax(scores, dim=1))


def _read(prompts: Prompts, weight: Tensor) -> Tensor:
    return einsum(prompts.y, weight, "batch context d_y, batch context -> batch d_y")
