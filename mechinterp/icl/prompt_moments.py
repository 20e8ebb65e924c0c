"""Second moments of the contexts of prompts, the input of algorithms of linear regression."""

from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, covariance_matrix


class PromptMoments:
    """Moments of prompts that the algorithms use, in float64.

    The task is the one that a model was trained on; the prompts may come from another task. It gives the covariance Sigma of
    preconditioned gradient descent and the penalty of the posterior mean.
    """

    def __init__(self, prompts: Prompts, task: TaskConfig) -> None:
        self.prompts = prompts.to(torch.float64)
        self.task = task

    def times(self, factor: float) -> "PromptMoments":
        """Moments with S and b times a factor; with factor L / L_0 they are sums over pairs divided by a fixed L_0."""
        scaled, (values, vectors) = PromptMoments(self.prompts, self.task), self._eigh
        scaled.S, scaled.b = factor * self.S, factor * self.b
        scaled._eigh = (factor * values, vectors)
        return scaled

    @property
    def context_length(self) -> int:
        return self.prompts.x.shape[1]

    @property
    def n_pairs(self) -> Float[Tensor, "batch 1"]:
        """Number of pairs of each context."""
        return self.S.new_full((len(self.prompts), 1), self.context_length)

    @cached_property
    def S(self) -> Float[Tensor, "batch d_x d_x"]:
        """X^T X / L, unit x^2."""
        return self.prompts.x.mT @ self.prompts.x / self.context_length

    @cached_property
    def b(self) -> Float[Tensor, "batch d_x d_y"]:
        """X^T y / L, unit x y."""
        return self.prompts.x.mT @ self.prompts.y / self.context_length

    def gradient(self, w: Float[Tensor, "batch d_x d_y"]) -> Float[Tensor, "batch d_x d_y"]:
        """Negative gradient b - S w."""
        return self.b - self.S @ w

    @property
    def eigenvalues(self) -> Float[Tensor, "batch d_x"]:
        """Eigenvalues s of S, smallest first."""
        return self._eigh[0]

    @cached_property
    def mode_predictions(self) -> Float[Tensor, "batch d_x d_y"]:
        """<v, x_query> <v, b> for each eigenvector v of S.

        The prediction of w = phi(S) b is their sum with weights phi(s).
        """
        vectors = self._eigh[1]
        query = (self.prompts.x_query[:, None] @ vectors).mT
        return query * (vectors.mT @ self.b)

    def query_times(self, phi: Float[Tensor, "batch d_x"]) -> Float[Tensor, "batch d_x"]:
        """phi(S) x_query, for phi given at the eigenvalues."""
        vectors = self._eigh[1]
        return ((self.prompts.x_query[:, None] @ vectors * phi[:, None]) @ vectors.mT)[:, 0]

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
        """Ridge penalty of the posterior mean under a dense Gaussian prior with the task's variance; unit x^2."""
        return self.task.posterior_penalty
