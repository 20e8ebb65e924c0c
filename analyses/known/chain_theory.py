"""Linear theory of a Langevin chain that starts at a quadratic minimum: the length of the run alone makes a bias."""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call

from mechinterp.known import Entry


def curvatures(entry: Entry) -> Float[np.ndarray, " direction"]:
    """Eigenvalues of the Hessian of the exact loss of an entry at its weights, unit y^2 / weight^2."""
    named = {name: each.detach() for name, each in entry.module.named_parameters()}
    sizes = [each.numel() for each in named.values()]
    at_module = _Loss(entry)

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split(sizes)
        weights = {
            f"module.{name}": part.reshape(each.shape)
            for (name, each), part in zip(named.items(), parts, strict=True)
        }
        return functional_call(at_module, weights)

    flat = torch.cat([each.flatten() for each in named.values()])
    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat)).numpy()


class _Loss(torch.nn.Module):
    """The exact loss as a module, so that its weights can be replaced."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.module, self.entry = entry.module, entry

    def forward(self) -> Tensor:
        return self.entry.loss(self.module)


def predicted(
    curvature: Float[np.ndarray, " direction"],
    settings: Mapping[str, float | int],
    *,
    first: int = 0,
) -> float:
    """Expected estimate of a chain w <- w - (lr/2) (n_beta h + localization) w + N(0, lr) from 0, with exact gradients.

    After t steps the variance in a direction of curvature h is lr (1 - q^2t) / (1 - q^2) with q = 1 - (lr/2) (n_beta h +
    localization); the estimate is the mean of n_beta h variance / 2 over the steps, summed over directions.

    Args:
        settings: `lr`, `n_beta`, `localization`, `num_draws` and `num_burnin_steps`, as in devinterp.
        first: First step of the mean; the start is step 0.
    Example:
        >>> chain = {"lr": 1e-4, "n_beta": 100.0, "num_draws": 1_000_000}
        >>> round(predicted(np.array([1.0, 2.0, 0.0]), chain), 2)
        1.0
    """
    lr, n_beta = settings["lr"], settings["n_beta"]
    steps = np.arange(first, settings["num_draws"] + settings.get("num_burnin_steps", 0))[:, None]
    curvature = np.maximum(curvature, 0.0)
    curvature = curvature[curvature > 1e-9 * curvature.max()]
    q = 1 - lr / 2 * (n_beta * curvature + settings.get("localization", 0.0))
    variance = lr * (1 - q ** (2 * steps)) / (1 - q**2)
    return float((n_beta * curvature * variance / 2).mean(0).sum())
