"""Loss and gradient of deep models: by autograd, or hand-written for attention stacks with nonlinear scores."""

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.general import predictions
from mechinterp.models.run.linear import linear_pass
from mechinterp.models.weights import Weights
from mechinterp.training.general.attention import attend
from mechinterp.training.general.forward import Forward


def loss_and_gradients(weights: Weights, prompts: Prompts) -> tuple[Tensor, Weights]:
    """Loss, in units of y^2, and its gradient in the weights.

    The loss is the mean over prompts and responses of (y_hat - y_query)^2.

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
    if not _is_written_out(weights):
        return _by_autograd(weights, prompts)
    with torch.no_grad():
        forward = Forward(weights, prompts)
        error = forward.prediction - prompts.y_query.T
        return error.square().mean(), forward.gradients(error * (2 / error.numel()))


@torch.no_grad()
def loss_of(weights: Weights, prompts: Prompts) -> Float[Tensor, ""]:
    """Loss alone, in units of y^2."""
    if _is_written_out(weights):
        predicted = Forward(weights, prompts).prediction.T
    else:
        predicted = _predictions(weights, prompts)
    return (predicted - prompts.y_query).square().mean()


def _is_written_out(weights: Weights) -> bool:
    """True if `Forward` computes the model: attention only, with nonlinear scores."""
    return weights.model.is_stack and not weights.is_linear_map


@torch.inference_mode(False)
@torch.enable_grad()
def _by_autograd(weights: Weights, prompts: Prompts) -> tuple[Tensor, Weights]:
    # Tensors made in torch.inference_mode take no gradients; their copies do.
    copies = {n: t.clone() if t.is_inference() else t for n, t in weights.tensors.items()}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in copies.items()}
    error = _predictions(weights.with_tensors(leaves), prompts) - prompts.y_query
    loss = error.square().mean()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), weights.with_tensors(dict(zip(leaves, gradients, strict=True)))


def _predictions(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    if weights.is_linear_map:
        return linear_pass(weights, prompts).prediction()
    return predictions(weights, prompts, attend=attend)
