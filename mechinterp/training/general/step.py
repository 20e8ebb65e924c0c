"""Loss and gradient of deep models: by autograd, or hand-written for attention stacks with nonlinear scores."""

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.general import predictions, predictions_at_every
from mechinterp.models.run.linear import linear_pass
from mechinterp.models.weights import Weights
from mechinterp.training.general.attention import attend
from mechinterp.training.general.forward import Forward


def loss_and_gradients(
    weights: Weights, prompts: Prompts, *, first_counted: int | None = None
) -> tuple[Tensor, Weights]:
    """Loss, in units of y^2, and its gradient in the weights.

    The loss is the mean over prompts and responses of (y_hat - y)^2, at the query or at every x.

    Args:
        first_counted: Least number of pairs before an x that counts; None: the query alone.
    Example:
        >>> from mechinterp.icl.prompts import sample_prompts
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.models.constructions.stack import stack_of_layers
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> weights = stack_of_layers(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0)
        >>> loss, gradients = loss_and_gradients(weights, sample_prompts(TaskConfig(), 8))
        >>> gradients.W_Q.any()
        tensor(False)
    """
    if first_counted is None and _is_written_out(weights):
        with torch.no_grad():
            forward = Forward(weights, prompts)
            error = forward.prediction - prompts.y_query.T
            return error.square().mean(), forward.gradients(error * (2 / error.numel()))
    with torch.inference_mode(False), torch.enable_grad():
        # Tensors made in torch.inference_mode take no gradients; their copies do.
        copies = {n: t.clone() if t.is_inference() else t for n, t in weights.tensors.items()}
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in copies.items()}
        of_leaves = weights.with_tensors(leaves)
        if first_counted is None:
            loss = (predictions_for_training(of_leaves, prompts) - prompts.y_query).square().mean()
        else:
            loss = losses_at_every(of_leaves, prompts)[first_counted:].mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), weights.with_tensors(dict(zip(leaves, gradients, strict=True)))


@torch.no_grad()
def loss_of(weights: Weights, prompts: Prompts) -> Float[Tensor, ""]:
    """Loss at the query alone, in units of y^2."""
    if _is_written_out(weights):
        predicted = Forward(weights, prompts).prediction.T
    else:
        predicted = predictions_for_training(weights, prompts)
    return (predicted - prompts.y_query).square().mean()


def losses_at_every(weights: Weights, prompts: Prompts) -> Float[Tensor, " n_pairs"]:
    """Loss after 0 to L pairs, in units of y^2, from one pass over the prompts."""
    errors = predictions_at_every(weights, prompts, attend=attend) - prompts.y_of_every_x
    return errors.square().mean((0, 2))


def _is_written_out(weights: Weights) -> bool:
    """True if `Forward` computes the model: attention only, with nonlinear scores."""
    return weights.model.is_stack and not weights.is_linear_map


def predictions_for_training(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Predictions at the query by the fastest way that autograd can differentiate."""
    if weights.is_linear_map:
        return linear_pass(weights, prompts).prediction()
    return predictions(weights, prompts, attend=attend)
