"""Models of random weights, which tell what a model's task needs no training for."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.algorithm_tests import relative_risk, scaled_risk
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.run.predictor import Predictor, predictor_of
from mechinterp.models.weights import stacked

N_RANDOM = 19
"""Models of random weights; one that none of them reaches has a p-value of .05."""
NULL_PROMPTS = 64
"""Prompts that these are asked on, of those given the first."""


def null_risk(
    predictor: Predictor | None, prompts: Prompts, seed: int
) -> tuple[Float[np.ndarray, " model"], Float[np.ndarray, " model"]]:
    """Relative risks of models with the same singular values in random directions: as they are, and at the best factor.

    A model whose weights are not known has none. Tensors are drawn in the order of their names, since files have them
    in different orders.
    """
    weights = None if predictor is None else predictor.weights
    if weights is None:
        return np.empty(0), np.empty(0)
    few, generator, risks = prompts[:NULL_PROMPTS], generator_for(seed, "init", 1), []
    matrices = sorted(weights.by_name.items())
    values = {name: _singular_values(tensor) for name, tensor in matrices}
    for _ in range(N_RANDOM):
        drawn = {
            name: _random_directions(tensor, values[name], generator) for name, tensor in matrices
        }
        random = predictor_of(weights.with_tensors(stacked(drawn, weights.n_layers)))
        predictions = random.predict(few).detach().cpu().double()
        target = few.y_query_clean
        risks.append((relative_risk(predictions, target), scaled_risk(predictions, target)[0]))
    as_they_are, scaled = np.nan_to_num(np.array(risks), nan=np.inf).T
    return as_they_are, scaled


def _singular_values(tensor: Tensor) -> Tensor | None:
    """Those of matrices; None of what is none."""
    if tensor.ndim < 2 or tensor.numel() == 0:
        return None
    return torch.linalg.svdvals(tensor.cpu().double())


def _random_directions(tensor: Tensor, values: Tensor | None, generator: torch.Generator) -> Tensor:
    """Matrices of these singular values; of what is no matrix the entries in random order."""
    if values is None:
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].reshape(tensor.shape)
    *axes, rows, columns = tensor.shape
    shapes = [(*axes, n, values.shape[-1]) for n in (rows, columns)]
    left, right = (
        torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q
        for shape in shapes
    )
    return (left * values[..., None, :] @ right.mT).to(tensor)
