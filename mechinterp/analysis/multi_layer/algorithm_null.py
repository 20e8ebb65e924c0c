"""Models of random weights, which tell what a model's task needs no training for."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.algorithm_tests import relative_risk
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.run.predictor import Predictor, predictor_of
from mechinterp.models.weights import stacked

N_RANDOM = 19
"""Models of random weights; one that none of them reaches has a p-value of .05."""
NULL_PROMPTS = 64
"""Prompts that these are asked on, of those given the first."""


def null_risk(
    predictor: Predictor | None, prompts: Prompts, seed: int
) -> Float[np.ndarray, " model"]:
    """Relative risks of models whose matrices have the same singular values in random directions, which no
    basis of the stream is special to; none of a model whose weights are not known. Tensors go by name, since
    files have them in orders of their own."""
    weights = None if predictor is None else predictor.weights
    if weights is None:
        return np.empty(0)
    few, generator, risks = prompts[:NULL_PROMPTS], generator_for(seed, "init", 1), []
    matrices = sorted(weights.by_name.items())
    values = {name: _singular_values(tensor) for name, tensor in matrices}
    for _ in range(N_RANDOM):
        drawn = {
            name: _random_directions(tensor, values[name], generator) for name, tensor in matrices
        }
        random = predictor_of(weights.with_tensors(stacked(drawn, weights.n_layers)))
        predictions = random.predict(few).detach().cpu().double()
        risks.append(relative_risk(predictions, few.y_query_clean))
    return np.nan_to_num(np.array(risks), nan=np.inf)


def _singular_values(tensor: Tensor) -> Tensor | None:
    """Those of matrices; None of what is none."""
    if tensor.ndim < 2 or tensor.numel() == 0:
        return None
    return torch.linalg.svdvals(tensor.cpu().double())


def _random_directions(tensor: Tensor, values: Tensor | None, generator: torch.Generator) -> Tensor:
    """Matrices of these singular values; of what is no matrix the entries in random order."""
    if values is None:
        order = torch.randperm(tensor.numel(), generator=generator, device="cpu")
        return tensor.flatten()[order].reshape(tensor.shape)
    *axes, rows, columns = tensor.shape
    shapes = [(*axes, n, values.shape[-1]) for n in (rows, columns)]
    left, right = (
        torch.linalg.qr(
            torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        ).Q
        for shape in shapes
    )
    return (left * values[..., None, :] @ right.mT).to(tensor)
