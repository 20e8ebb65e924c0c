"""Second moments of the contexts of prompts: what algorithms of linear regression read of them."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, covariance_matrix


class PromptMoments:
    """What the algorithms read of prompts, in float64.

    The task is the one that a model was trained on, which the prompts need not be drawn from: of it
    come the covariance Sigma of preconditioned gradient descent and the penalty of the posterior
    mean.
    """

    def __init__(self, prompts: Prompts, task: TaskConfig) -> None:
        self.prompts = prompts.to(torch.float64)
        self.task = task

    @property
    def context_length(self) -> int:
        return self.prompts.x.shape[1]

    @property
    def n_pairs(self) -> Float[Tensor, "batch 1"]:
        """Pairs of each context."""
        return self.S.new_full((len(self.prompts), 1), self.context_length)

    @cached_property
    def S(self) -> Float[Tensor, "batch d_x d_x"]:
        """X^T X / L, unit x^2."""
        return self.prompts.x.mT @ self.prompts.x / self.context_length

    @cached_property
    def b(self) -> Float[Tensor, "batch d_x d_y"]:
        """X^T y / L, unit x y."""
        return self.prompts.x.mT @ self.prompts.y / self.context_length

    @property
    def eigenvalues(self) -> Float[Tensor, "batch d_x"]:
        """Eigenvalues s of S, smallest first."""
        return self._eigh[0]

    @cached_property
    def mode_predictions(self) -> Float[Tensor, "batch d_x d_y"]:
        """<v, x_query> <v, b> for each eigenvector v of S.

        With w = phi(S) b the prediction is their sum with weights phi(s).
        """
        vectors = self._eigh[1]
        query = (self.prompts.x_query[:, None] @ vectors).mT
        return query * (vectors.mT @ self.b)

    @cached_property
    def _eigh(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.S)
        return values, vectors

    @cached_property
    def covariance(self) -> tuple[Float[Tensor, " d_x"], Float[Tensor, "d_x d_x"]]:
        """Eigenvalues and eigenvectors of Sigma."""
        Sigma = torch.from_numpy(covariance_matrix(self.task.covariance, self.task.d_x))
        values, vectors = torch.linalg.eigh(Sigma.to(self.S))
        return values, vectors

    @property
    def curvature(self) -> float:
        """Mean over prompts of the largest eigenvalue of S, unit x^2."""
        return self.eigenvalues[:, -1].mean().item()

    @property
    def penalty(self) -> float:
        """Of the posterior mean."""
        return self.task.posterior_penalty


class JoinedMoments(PromptMoments):
    """Moments of several sets of prompts, one after another; contexts may differ in length."""

    def __init__(self, parts: Sequence[PromptMoments]) -> None:
        longest = max(part.context_length for part in parts)
        each = [_padded(part.prompts, longest) for part in parts]
        joined = {f.name: torch.cat([getattr(p, f.name) for p in each]) for f in fields(Prompts)}
        super().__init__(Prompts(**joined), parts[0].task)
        self.S = torch.cat([part.S for part in parts])
        self.b = torch.cat([part.b for part in parts])
        self._n_pairs = torch.cat([part.n_pairs for part in parts])

    @property
    def n_pairs(self) -> Float[Tensor, "batch 1"]:
        return self._n_pairs


def _padded(prompts: Prompts, length: int) -> Prompts:
    """With pairs of zeros behind the context; nothing is read of them, as the moments are given."""
    missing = length - prompts.x.shape[1]
    x, y = (F.pad(side, (0, 0, 0, missing)) for side in (prompts.x, prompts.y))
    return replace(prompts, x=x, y=y)
