"""Models with every head replaced by its idealised circuit, and the closed-form learner they amount to.

What survives of the prediction is the evidence behind a label.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.learners.baseline_comparison import kernel_omegas
from mechinterp.analysis.stats import mean_and_sem, r2_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import from_circuits
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.run.evaluation import evaluation_prompts


@dataclass(frozen=True)
class Faithfulness:
    """How near what stands in for a model comes to its predictions."""

    r2: float
    """1 - E|model - substitute|^2 / E|model|^2, over prompts and responses."""
    r2_sem: float
    rms: float
    """Root of the mean square of model - substitute, unit y."""
    rms_sem: float


def faithfulness(
    prediction: Float[Tensor, "batch d_y"], substitute: Float[Tensor, "batch d_y"]
) -> Faithfulness:
    """How much of the prediction the substitute explains, with standard errors over prompts.

    Example:
        >>> faithfulness(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]])).r2
        1.0
    """
    mean, sem = mean_and_sem((prediction - substitute).square().mean(1).numpy())
    rms = float(mean) ** 0.5
    rms_sem = float(sem) / (2 * rms) if rms else 0.0
    return Faithfulness(*r2_and_sem(substitute, prediction), rms, rms_sem)


def idealised(
    weights: AttentionWeights,
    x_blocks: Float[Tensor, "head d_x d_x"],
    mu: Float[Tensor, "head d_y"],
) -> AttentionWeights:
    """Heads that compare x with x by these blocks and read y_n into prediction n by mu, and nothing else."""
    d_x, d_y = weights.d_x, weights.d_y
    return from_circuits(
        torch.nn.functional.pad(x_blocks, (0, d_y, 0, d_y)),
        torch.nn.functional.pad(torch.diag_embed(mu), (0, 0, d_x, 0)),
        score=weights.score,
        score_slope=weights.score_slope,
        attend_to_self=weights.attend_to_self,
    )


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Prompts of a task and what one gradient step needs of them."""

    prompts: Prompts
    task: TaskConfig
    moment: Float[Tensor, "batch d_x d_y"]
    """(1/L) sum_l x_l y_l."""
    centred_moment: Float[Tensor, "batch d_x d_y"]
    """(1/L) sum_l (x_l - mean(x)) y_l."""

    def gradient_step(
        self, preconditioner: Float[Tensor, "d_y d_x d_x"], *, centred: bool
    ) -> Float[Tensor, "batch d_y"]:
        """One step of (debiased) gradient descent from zero: x_query^T Gamma_n moment_n."""
        moment = self.centred_moment if centred else self.moment
        return torch.einsum("bi,nij,bjn->bn", self.prompts.x_query, preconditioner, moment)

    @cached_property
    def ridge(self) -> Float[Tensor, "batch d_y"]:
        """Predictions of ridge regression at the task's own penalty."""
        return ridge(self.prompts, penalty=self.task.posterior_penalty)

    @cached_property
    def families(self) -> dict[str, Float[Tensor, "member batch d_y"]]:
        """Simple learners, up to a factor; of kernel smoothers several scales."""
        x, y, query = self.prompts.x, self.prompts.y, self.prompts.x_query
        scores = torch.einsum("blx,bx->bl", x, query)
        smoothers = [torch.softmax(omega * scores, 1) for omega in kernel_omegas(x)]
        return {
            "vanilla_gd": torch.einsum("bx,bxn->bn", query, self.moment)[None],
            "debiased_gd": torch.einsum("bx,bxn->bn", query, self.centred_moment)[None],
            "kernel_head": torch.einsum("obl,bln->obn", torch.stack(smoothers), y),
            "ridge": self.ridge[None],
        }


@lru_cache(maxsize=16)
def evaluation(task: TaskConfig, n_prompts: int, seed: int, attend_to_self: bool) -> Evaluation:
    """Prompts drawn once for all models of a task; with `attend_to_self` the token (x_query, 0) counts, too."""
    prompts = evaluation_prompts(task, n_prompts=n_prompts, seed=seed)
    keys = prompts.tokens if attend_to_self else prompts.context_tokens
    x, y = keys.split([task.d_x, task.d_y], dim=-1)
    # Linear attention divides by the length of the context, however many keys there are.
    length = prompts.x.shape[1]
    moment = x.mT @ y
    centred = moment - x.mean(1)[:, :, None] * y.sum(1)[:, None]
    return Evaluation(prompts, task, moment / length, centred / x.shape[1])
