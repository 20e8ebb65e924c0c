"""Tokens of prompts, in the layout that a model reads."""

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import ModelConfig
from mechinterp.icl.prompts import Prompts


def tokens_of(
    prompts: Prompts, model: ModelConfig, *, d_x: int, d_y: int
) -> Float[Tensor, "batch pos d_token"]:
    """Tokens of the prompts in the model's layout; the query is the last token.

    Raises:
        ValueError: If the prompts have another d_x or d_y, or more positions than the model.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(tokens_of(prompts, ModelConfig(), d_x=5, d_y=1).shape)
        (8, 41, 6)
    """
    require_sizes(prompts, d_x=d_x, d_y=d_y)
    length, most = prompts.x.shape[1], model.longest_context
    if most is not None and length > most:
        raise ValueError(
            f"context_length must be <= {most}, all that n_positions = {model.n_positions} has room for, "
            f"got {length}."
        )
    return interleaved(prompts) if model.layout == "in_turn" else prompts.tokens


def require_sizes(prompts: Prompts, *, d_x: int, d_y: int) -> None:
    """Refuse prompts whose d_x or d_y is not the model's.

    Raises:
        ValueError: If the sizes differ; the message names both.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> require_sizes(prompts, d_x=5, d_y=1)
    """
    sizes = (prompts.x.shape[2], prompts.y.shape[2])
    if sizes != (d_x, d_y):
        raise ValueError(f"The prompts' (d_x, d_y) must be the model's, {(d_x, d_y)}, got {sizes}.")


def interleaved(prompts: Prompts) -> Float[Tensor, "batch pos d_x"]:
    """x_1, y_1, ..., x_L, y_L, x_query, each y padded with zeros to d_x.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(interleaved(prompts).shape)
        (8, 81, 5)
    """
    padded = F.pad(prompts.y, (0, prompts.x.shape[2] - prompts.y.shape[2]))
    pairs = torch.stack([prompts.x, padded], dim=2).flatten(1, 2)
    return torch.cat([pairs, prompts.x_query[:, None]], dim=1)
