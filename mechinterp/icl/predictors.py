"""Closed-form learners with a model's signature: prompts in, predictions [batch, d_y] out, unit y."""

from dataclasses import replace

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.theory.linear import fixed_point, modes, population_moments


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


def joint_debiased_gd(
    prompts: Prompts, *, theta: Float[np.ndarray, "d_y source d_x"]
) -> Float[Tensor, "batch d_y"]:
    """One step for several responses: y_hat_n = sum_mi theta_nmi g_mi x_query_i, g = (1/L) sum_l y_l (x_l - mean(x))^T.

    Args:
        theta: Weight of response m on coordinate i in prediction n; eta for n = m and 0 elsewhere is `debiased_gd`.
    Source:
        Derived here; `analyses.lib.theory.several_tasks` gives the best theta.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> step = joint_debiased_gd(prompts, theta=np.full((1, 1, 5), 0.88))
        >>> torch.allclose(step, debiased_gd(prompts, eta=0.88), atol=1e-5)
        True
    """
    centred = prompts.x - prompts.x.mean(1, keepdim=True)
    seen = einsum(prompts.y, centred, "batch context source, batch context d_x -> batch source d_x")
    step = torch.as_tensor(theta / prompts.x.shape[1], dtype=seen.dtype, device=seen.device)
    parts = "batch source d_x, d_y source d_x, batch d_x -> batch d_y"
    return einsum(seen, step, prompts.x_query, parts)


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
        beta = torch.linalg.pinv(prompts.x) @ prompts.y
    else:
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        beta = torch.linalg.solve(gram + penalty * identity, moment)
    return einsum(beta, prompts.x_query, "batch d_x d_y, batch d_x -> batch d_y")


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


def nearest_neighbours(prompts: Prompts, *, count: int) -> Float[Tensor, "batch d_y"]:
    """Mean response of the `count` pairs whose x is nearest to the query, or of all pairs if there are fewer.

    Raises:
        ValueError: If count is below 1.
    Source:
        Garg et al. 2022, arXiv 2208.01066; their baseline has count = 3.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> torch.allclose(nearest_neighbours(prompts, count=40), prompts.y.mean(1))
        True
    """
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}.")
    distance = (prompts.x - prompts.x_query[:, None]).square().sum(-1)
    nearest = distance.topk(min(count, prompts.x.shape[1]), largest=False).indices
    return prompts.y.take_along_dim(nearest[..., None], dim=1).mean(1)


def pcr(
    prompts: Prompts, *, components: int, covariance: Float[np.ndarray, "d_x d_x"] | None = None
) -> Float[Tensor, "batch d_y"]:
    """Principal component regression: least squares on the largest principal components of x.

    Args:
        components: Number m of components, from 0 to d_x.
        covariance: Covariance of x, whose eigenvectors are the components; None: X^T X of each
            prompt's own context.
    Raises:
        ValueError: If components is not in 0 to d_x.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 4.4, where N is large.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> everything = pcr(prompts, components=5)
        >>> torch.allclose(everything, ridge(prompts, penalty=0.0), atol=1e-4)
        True
    """
    _check_components(prompts, components)
    if covariance is None:
        basis = torch.linalg.eigh(prompts.x.mT @ prompts.x).eigenvectors.flip(-1)[..., :components]
    else:
        vectors = np.linalg.eigh(covariance)[1][:, ::-1][:, :components].copy()
        basis = torch.from_numpy(vectors).to(prompts.x)
    scores = torch.linalg.pinv(prompts.x @ basis) @ prompts.y
    return einsum(basis @ scores, prompts.x_query, "batch d_x d_y, batch d_x -> batch d_y")


def one_step_pcr(
    prompts: Prompts, *, components: int, covariance: Float[np.ndarray, "d_x d_x"]
) -> Float[Tensor, "batch d_y"]:
    """Function of linear attention on its plateaus: b^T sum_{d <= m} m_d e_d e_d^T x_query.

    b = (1/L) sum_l y_l x_l and m_d = 1 / (lambda_d a_d), for noiseless tasks with beta ~ N(0, I). For long contexts it
    approaches `pcr` with this covariance.

    Args:
        components: Number m of components, from 0 to d_x.
        covariance: Covariance of x.
    Raises:
        ValueError: If components is not in 0 to d_x, or covariance is not symmetric and positive.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (22).
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> everything = one_step_pcr(prompts, components=5, covariance=np.eye(5))
        >>> torch.allclose(everything, vanilla_gd(prompts, eta=1 / (1 + 6 / 40)))
        True
    """
    _check_components(prompts, components)
    length = prompts.x.shape[1]
    M = fixed_point(modes(population_moments(covariance, context_length=length)), range(components))
    weight = prompts.x_query @ torch.from_numpy(M).to(prompts.x).mT
    similarity = einsum(prompts.x, weight, "batch context d_x, batch d_x -> batch context")
    return _read(prompts, similarity) / length


def _check_components(prompts: Prompts, components: int) -> None:
    d_x = prompts.x.shape[2]
    if not 0 <= components <= d_x:
        raise ValueError(f"components must lie between 0 and d_x = {d_x}, got {components}.")


def _read(prompts: Prompts, weight: Tensor) -> Tensor:
    return einsum(prompts.y, weight, "batch context d_y, batch context -> batch d_y")
