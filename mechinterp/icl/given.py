"""Task of given prompts, whose law is known or estimated from them."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.predictors import ridge_path
from mechinterp.icl.prompts import Prompts

PENALTIES = (0.0, *np.geomspace(0.01, 1000, 31))
"""Ridge penalties among which the best one is chosen."""
PRECISIONS = (torch.float32, torch.float64)


class PromptsTask(TaskConfig):
    """Task of given prompts: `evaluation_prompts` returns these prompts, and an unknown law gives no further ones.

    Without a law, the covariance is the second moment of all x, and noise_var / beta_var is the best ridge penalty on
    these prompts.
    """

    prompts: Prompts
    law: TaskConfig | None
    """Task from which the prompts were drawn; None if unknown."""

    @classmethod
    def of(cls, prompts: Prompts, law: TaskConfig | None = None) -> "PromptsTask":
        """Task of given prompts.

        Raises:
            ValueError: If d_x or d_y differ between law and prompts.
        """
        length, d_x, d_y = *prompts.x.shape[1:], prompts.y.shape[2]
        sizes = {"d_x": d_x, "d_y": d_y}
        for name, size in sizes.items():
            if law is not None and getattr(law, name) != size:
                rule = f"must be that of the prompts, {size}"
                raise ValueError(f"task.{name} {rule}, got {getattr(law, name)}.")
        own = _estimated(prompts) if law is None else vars(law)
        own = {each.name: own[each.name] for each in fields(cls) if each.name in own}
        task = cls(**{**own, **sizes, "context_length": length})
        for name, value in (("prompts", prompts), ("law", law)):
            object.__setattr__(task, name, value)
        if law is not None:
            object.__setattr__(task, "_given", law.given | {"context_length"})
        return task

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptsTask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def pool(self) -> Tensor:
        """Pool of the law, [task, d_x, d_y]."""
        return super().pool() if self.law is None else self.law.pool()

    @property
    def _key(self) -> tuple[int, TaskConfig | None]:
        return id(self.prompts), self.law

    @property
    def fields_in_words(self) -> dict[str, str]:
        """Known facts about the prompts by name, in words."""
        if self.law is not None:
            return {**super().fields_in_words, "prompts": f"{len(self.prompts)} given"}
        sizes = {name: str(getattr(self, name)) for name in ("d_x", "d_y", "context_length")}
        return {**sizes, "prompts": f"{len(self.prompts)} given, their law is not known"}


def require_fitting(prompts: Prompts) -> None:
    """Refuse prompts whose tensors do not fit together, such as prompts with a tensor of another kind by `replace`.

    Raises:
        ValueError: If a tensor is empty, has another shape, or holds other numbers than the dense float32 or float64 of x.
    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> require_fitting(draw_prompts(TaskConfig(d_x=3), 8))
    """
    x = prompts.x
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(
            f"prompts.x must have shape [batch, L, d_x] without zeros, got {list(x.shape)}."
        )
    (batch, length, d_x), d_y = x.shape, max(1, *prompts.y.shape[2:3])
    shapes = {
        "x": (batch, length, d_x),
        "y": (batch, length, d_y),
        "x_query": (batch, d_x),
        "y_query": (batch, d_y),
        "y_query_clean": (batch, d_y),
        "beta": (batch, d_x, d_y),
        "drifting": (batch, length + 1, d_x, d_y),
    }
    for name, shape in shapes.items():
        tensor = getattr(prompts, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"prompts.{name} must have shape {list(shape)} for x of shape {list(x.shape)}, got {list(tensor.shape)}."
            )
        plain = tensor.layout == torch.strided and not tensor.is_meta and tensor.device == x.device
        if not plain or tensor.dtype != x.dtype or tensor.dtype not in PRECISIONS:
            raise ValueError(
                f"prompts.{name} must be dense float32 or float64, as all tensors of the prompts and on one device, got "
                f"{tensor.dtype} on {tensor.device}; Prompts.from_arrays takes arrays of any numbers."
            )


def no_law(task: TaskConfig) -> bool:
    """True for the task of given prompts with an unknown law."""
    return isinstance(task, PromptsTask) and task.law is None


def _estimated(prompts: Prompts) -> dict[str, Any]:
    """Covariance, beta_var and noise_var estimated from given prompts."""
    prompts = prompts.to(torch.float64)
    x = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1).flatten(0, 1)
    moment = (x.mT @ x / len(x)).numpy(force=True)
    floor = 1e-6 * max(float(np.trace(moment)), 1e-30)
    matrix = (moment + moment.T) / 2 + floor * np.eye(len(moment))
    # Where all x are 0, y says nothing about beta.
    per_beta = float(np.trace(matrix)) if moment.any() else 1.0
    beta_var = max(float(prompts.y.square().mean()) / per_beta, 1e-30)
    covariance = CovarianceConfig(kind="matrix", matrix=tuple(map(tuple, matrix.tolist())))
    noise_var = _best_penalty(prompts) * beta_var
    return {"covariance": covariance, "beta_var": beta_var, "noise_var": noise_var}


def _best_penalty(prompts: Prompts) -> float:
    """Penalty of ridge regression with the smallest loss on these prompts."""
    errors = ridge_path(prompts, PENALTIES) - prompts.y_query
    return float(PENALTIES[int(errors.square().mean((1, 2)).argmin())])
