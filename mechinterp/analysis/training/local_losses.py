"""Loss of a model as a function of its trained entries, at many points at once.

For linear attention trained on moments it is the exact loss of the population. For other layers,
and for stacks of layers, it is the loss on one fixed set of prompts. Entries that training does not
move stay fixed."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeGuard

import numpy as np
import torch
from torch import nn

from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.training.module_losses import (
    ModuleLoss,
    chosen_entries,
    module_loss,
    predictor_loss,
)
from mechinterp.analysis.training.prompt_losses import prompts_loss
from mechinterp.analysis.training.sampler import BatchLoss, LocalLoss, Points
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.config import TaskConfig
from mechinterp.display import counted
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights
from mechinterp.theory.learning_coefficient import (
    learning_coefficient,
    map_rank,
    reachable_dimension,
)
from mechinterp.theory.linear import Heads, MergedHeads, Moments
from mechinterp.training.linear import flat_heads, unflatten
from mechinterp.training.linear_models import sample_moments, task_moments


def local_loss(
    source: Source | nn.Module | LocalLoss,
    prompts: Prompts | None,
    weights: str | Sequence[str] | None,
    loss: ModuleLoss | None,
    sampled_heads: Sequence[int] | None,
    n_prompts: int,
    seed: int,
) -> LocalLoss:
    """The loss around the weights: a given one, that of the population if it is known, or that on
    prompts. Arguments and errors are those of `local_learning_coefficient`."""
    if isinstance(source, LocalLoss):
        return source
    if loss is not None:
        if not isinstance(source, nn.Module):
            raise ValueError(f"loss needs a PyTorch module, got a {type(source).__name__}.")
        other = {"prompts": prompts, "sampled_heads": sampled_heads}
        if unused := [name for name, value in other.items() if value is not None]:
            raise ValueError(f"loss must stand without {', '.join(unused)}, which it does not use.")
        return module_loss(source, loss, weights=weights or "*")
    if weights is None and prompts is None and is_trained_on_moments(source):
        heads, task = heads_of_linear(source.weights), source.task
        return population_loss(heads, task_moments(task), sampled_heads=sampled_heads, task=task)
    if sampled_heads is not None:
        raise ValueError(
            "sampled_heads needs linear attention trained on moments, got another model, prompts or weights."
        )
    drawn = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    return loss_on(drawn, source, weights)


def loss_on(
    prompts: Prompts, source: Source, weights: str | Sequence[str] | None = None
) -> LocalLoss:
    """Loss of a model on fixed prompts, with the faster gradient: that of training, or the one through the hooks.

    Args:
        weights: Patterns of the names of the sampled parameters; None means all.
    """
    predictor = predictor_of(source)
    own = predictor.weights
    if own is None or predictor.is_hooked or _is_late(own, weights):
        return predictor_loss(source, prompts, weights=weights or "*")
    return prompts_loss(own, prompts, weights)


def _is_late(own: Weights, patterns: str | Sequence[str] | None) -> bool:
    """True if nothing before the second layer of a model with norms or MLPs is sampled. The chains then share the run of
    the layers before, which the gradient of training would repeat for each."""
    if patterns is None or own.model.stack is not None or own.n_layers == 1:
        return False
    shapes = {name: tensor.shape for name, tensor in own.by_name.items()}
    chosen = chosen_entries(shapes, [patterns] if isinstance(patterns, str) else patterns)
    later = tuple(f"blocks.{layer}." for layer in range(1, own.n_layers))
    return all(name.startswith(("unembed.", "ln_final.", *later)) for name in chosen)


def quick_parts(
    source: Source, prompts: Prompts | None, n_prompts: int, seed: int
) -> Iterator[LocalLoss]:
    """Losses of small parts of a model's weights: a head of the last layer and the read-out, on all prompts, a quarter and a
    sixteenth of them."""
    drawn = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    hooked = predictor_of(source).hooked
    names = [name for name, _ in hooked.model.named_parameters()]
    for share in (1, 4, 16):
        for name in (f"blocks.{hooked.n_layers - 1}.attn.W_*", "unembed.W_U"):
            if any(fnmatchcase(own, name) for own in names):
                some = drawn[: -(-len(drawn) // share)]
                yield loss_on(some, source, f"{name}[0]" if "attn" in name else name)


def is_trained_on_moments(source: object) -> TypeGuard[Checkpoint]:
    """True for one layer of linear attention with no parameters but v, K and Q (or U)."""
    if not isinstance(source, Checkpoint):
        return False
    model, train = source.config.model, source.config.train
    return model.score == "linear/L" and model.one_attention and train.optimizer != "adam"


def population_loss(
    heads: Heads,
    moments: Moments,
    *,
    sampled_heads: Sequence[int] | None = None,
    task: TaskConfig | None = None,
) -> LocalLoss:
    """Exact loss of linear attention on a population, from its moments.

    Args:
        sampled_heads: Heads whose entries are free; None means all.
        task: Task of the moments, for mini-batches of fresh prompts.
    Raises:
        ValueError: If a head does not exist.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear import separate_heads
        >>> moments = population_moments(np.array([0.4, 0.3]), context_length=31)
        >>> population_loss(separate_heads(2, 2, std=1.0, seed=0), moments).sampled
        '10 entries: v and the x entries of q and k of 2 heads'
    """
    n_heads = heads.v.shape[-1]
    stated = list(range(n_heads) if sampled_heads is None else sampled_heads)
    chosen = sorted(set(stated))
    if not chosen or chosen[0] < 0 or chosen[-1] >= n_heads:
        raise ValueError(f"sampled_heads must name heads from 0 to {n_heads - 1}, got {stated}.")
    part, rest = taken(heads, chosen), taken(heads, [h for h in range(n_heads) if h not in chosen])
    fixed = rest.M if rest.v.size else np.zeros_like(moments.yz)
    at, merged = flat_heads(part), isinstance(part, MergedHeads)
    rank = len(moments.yz) if merged else heads.K.shape[-2]  # type: ignore[union-attr]
    exact, unknown = None, ""
    try:
        exact = learning_coefficient(moments, n_heads=len(chosen), rank=rank)
        reach = reachable_dimension(len(moments.yz), len(chosen) * rank)
        if map_rank(part) < reach:
            exact, unknown = None, f"heads move M in {map_rank(part)} of {reach} directions here"
    except ValueError as error:
        unknown = str(error)
    entries = "U" if merged else "the x entries of q and k"

    return LocalLoss(
        _of_moments(part, moments, fixed),
        at,
        f"{at.size} entries: v and {entries} of {counted(len(chosen), 'head')}",
        "the population",
        exact,
        unknown,
        on_minibatch=None if task is None else partial(_on_fresh_prompts, part, fixed, task),
    )


def taken(heads: Heads, chosen: int | list[int]) -> Heads:
    """Selected heads; for a path, the heads at selected times."""
    return type(heads)(**{name: values[chosen] for name, values in vars(heads).items()})


def _of_moments(heads: Heads, moments: Moments, fixed: np.ndarray) -> BatchLoss:
    """Loss and gradient of these heads beside others that add the matrix `fixed`."""

    def function(points: Points) -> tuple[np.ndarray, Points]:
        drawn = unflatten(heads, points)
        M = drawn.M + fixed
        # The force on M is -1/2 of the gradient.
        return moments.loss(M), -2 * flat_heads(drawn.velocity(moments.gradient(M)))

    return function


def _on_fresh_prompts(
    heads: Heads,
    fixed: np.ndarray,
    task: TaskConfig,
    points: Points,
    n_prompts: int,
    generator: torch.Generator,
) -> Points:
    """Gradients at each point on a batch of its own of fresh prompts."""
    drawn = draw_prompts(task, len(points) * n_prompts, generator=generator, dtype=torch.float64)
    rows = []
    for place, point in enumerate(points):
        batch = drawn[place * n_prompts : (place + 1) * n_prompts]
        sampled = sample_moments([batch], basis=np.eye(len(fixed)))
        rows.append(_of_moments(heads, sampled, fixed)(point[None])[1])
    return np.concatenate(rows)
