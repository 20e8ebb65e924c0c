"""Second moments of the contexts of prompts: what algorithms of linear regression read of them."""

from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, covariance_matrix


class PromptMoments:
    """What the algorithms read of prompts, in float64.

    The task is the one that a model was trained on, which the prompts need not be drawn from: of it
    come the covariance Sigma of preconditioned gradient descent and the penalty of the posterior
    mean.

    Args:
        scale: Factor on S and b: with L / L_0 they are sums over the pairs, divided by a fixed L_0.
    """

    def __init__(self, prompts: Prompts, task: TaskConfig, scale: float = 1.0) -> None:
        self.prompts = prompts.to(torch.float64)
        self.task = task
        self.scale = scale

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
        return self.scale * self.prompts.x.mT @ self.prompts.x / self.context_length

    @cached_property
    def b(self) -> Float[Tensor, "batch d_x d_y"]:
        """X^T y / L, unit x y."""
        return self.scale * self.prompts.x.mT @ self.prompts.y / self.context_length

    @cached_property
    def centred(self) -> "PromptMoments":
        """Those of x and y minus their means over the context; the query is the same."""
        x, y = (side - side.mean(1, keepdim=True) for side in (self.prompts.x, self.prompts.y))
        return PromptMoments(replace(self.prompts, x=x, y=y), self.task, self.scale)

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
