"""Files of recorded predictions, as owners of models write them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

N_PROMPTS = 64


def recorded(
    file: Path,
    predict: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    d_x: int,
    length: int,
    n_prompts: int = N_PROMPTS,
    seed: int = 9,
) -> Path:
    """Prompts of a linear task with the predictions of a model, `predict(x, y, x_query)`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_prompts, length + 1, d_x, generator=generator)
    beta = torch.randn(n_prompts, d_x, generator=generator)
    y = torch.einsum("bld,bd->bl", x, beta) + 0.1 * torch.randn(
        n_prompts, length + 1, generator=generator
    )
    with torch.no_grad():
        prediction = predict(x[:, :-1], y[:, :-1], x[:, -1])
    arrays = {"x": x[:, :-1], "y": y[:, :-1], "x_query": x[:, -1], "prediction": prediction}
    np.savez(file, **{name: array.numpy() for name, array in arrays.items()})
    return file
