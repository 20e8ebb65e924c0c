"""Loss of a model as a function of its trained entries, at many points at once.

For linear attention trained on moments it is the exact loss of the population. For other layers,
and for stacks of layers, it is the loss on one fixed set of prompts. Entries that training does not
move stay fixed."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.analysis.training.sampler import PROMPT_CHAINS, BatchLoss, LocalLoss, Points
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.config import TaskConfig
from mechinterp.display import counted
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.weights import Weights
from mechinterp.theory.learning_coefficient import (
    learning_coefficient,
    map_rank,
    reachable_dimension,
)
from mechinterp.theory.linear import Moments
from mechinterp.theory.linear_heads import Heads, MergedHeads, SeparateHeads
from mechinterp.training.general.step import loss_and_gradients as deep_loss
from mechinterp.training.linear.descent import sample_moments
from mechinterp.training.linear.flat import flatten, unflatten
from mechinterp.training.one_layer.step import by_tensors, membership

PromptsLoss = Callable[[Points, Prompts], tuple[Float[np.ndarray, " chain"], Points]]


def heads_of_linear(weights: Weights) -> Heads:
    """v, K and Q (or U) of one layer of linear attention with one response, in float64."""
    named = weights.circuits.to(torch.float64)
    d_x, factor = weights.d_x, named.scale * named.score_slope
    value, key = named.mu[:, 0].numpy(force=True), named.W_K[:, :d_x].mT.numpy(force=True)
    query = factor * named.W_Q[:, :d_x].mT.numpy(force=True)
    if named.merged_qk:
        return MergedHeads(v=value, U=np.einsum("hri,hrj->hij", key, query))
    return SeparateHeads(v=value, K=key, Q=query)


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
        >>> from mechinterp.theory.linear_heads import separate_heads
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
    at, merged = flatten(part), isinstance(part, MergedHeads)
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

    def of_fresh(points: Points, n_prompts: int, generator: torch.Generator) -> Points:
        assert task is not None
        drawn = sample_prompts(
            task, len(points) * n_prompts, generator=generator, dtype=torch.float64
        )
        rows = []
        for place, point in enumerate(points):
            batch = drawn[place * n_prompts : (place + 1) * n_prompts]
            sampled = sample_moments([batch], basis=np.eye(len(fixed)))
            rows.append(_of_moments(part, sampled, fixed)(point[None])[1])
        return np.concatenate(rows)

    return LocalLoss(
        _of_moments(part, moments, fixed),
        at,
        f"{at.size} entries: v and {entries} of {counted(len(chosen), 'head')}",
        "the population",
        exact,
        unknown,
        on_minibatch=None if task is None else of_fresh,
    )


def taken(heads: Heads, chosen: int | list[int]) -> Heads:
    """Selected heads; for a path, the heads at selected times."""
    return type(heads)(**{name: values[chosen] for name, values in vars(heads).items()})


def _of_moments(heads: Heads, moments: Moments, fixed: np.ndarray) -> BatchLoss:
    size, n_heads = moments.yz.size, heads.v.shape[-1]
    zz, yz = moments.zz.reshape(size, size), moments.yz.ravel()

    def function(points: Points) -> tuple[np.ndarray, Points]:
        drawn = unflatten(heads, points)
        M = drawn.M.reshape(-1, size) + fixed.ravel()
        bent = M @ zz
        loss, force = moments.yy - 2 * M @ yz + (M * bent).sum(1), 2 * (bent - yz)
        v = drawn.v[:, :, None]
        if isinstance(drawn, MergedHeads):
            U = drawn.U.reshape(*drawn.v.shape, size)
            parts = [U @ force[:, :, None], v * force[:, None]]
        else:
            K, Q = (rows.reshape(len(points), -1, len(fixed)) for rows in (drawn.K, drawn.Q))
            v = np.repeat(v, K.shape[1] // n_heads, axis=1)
            force = force.reshape(-1, *fixed.shape)
            along = Q @ force.mT
            read = (K * along).reshape(len(points), n_heads, -1).sum(2)
            parts = [read, v * along, v * K @ force]
        return loss, np.concatenate([part.reshape(len(points), -1) for part in parts], axis=1)

    return function


def has_written_gradient(source: object) -> TypeGuard[Checkpoint]:
    """True for one layer of attention, or a stack of attention layers, of `prompts_loss`."""
    if not isinstance(source, Checkpoint):
        return False
    if source.config.model.one_attention:
        heads = source.weights.circuits
        return heads.b_O is None and not heads.attend_to_self
    return source.weights.model.is_stack


def prompts_loss(checkpoint: Checkpoint, prompts: Prompts) -> LocalLoss:
    """Loss of one layer of attention, or of a stack of attention layers, on fixed prompts."""
    prompts, weights = prompts.to(torch.float64), checkpoint.weights
    if checkpoint.config.model.one_attention:
        heads = weights.circuits.to(torch.float64)
        free = _free_entries(heads)
        of, at = _of_layer(heads, free)
        names = " and ".join([", ".join(list(free)[:-1]), list(free)[-1]])
        sampled = f"{at.size} entries: the x entries of W_Q, and {names.removeprefix('W_Q, ')}"
    else:
        of, at = _of_stack(weights)
        sampled = f"{at.size} entries: all"
    unknown = "the loss on prompts is not a quadratic in one matrix"

    def of_some(points: Points, n_prompts: int, generator: torch.Generator) -> Points:
        rows = torch.randint(
            len(prompts), (len(points), n_prompts), generator=generator, device=generator.device
        )
        gradients = [
            of(point[None], prompts[chosen])[1] for point, chosen in zip(points, rows, strict=True)
        ]
        return np.concatenate(gradients)

    return LocalLoss(
        lambda points: of(points, prompts),
        at,
        sampled,
        f"{len(prompts)} prompts",
        unknown=unknown,
        remedy="; settle=True goes to a minimum on these prompts first",
        on_minibatch=of_some,
        chains=PROMPT_CHAINS,
    )


def _free_entries(heads: AttentionWeights) -> dict[str, Bool[np.ndarray, "head row column"]]:
    """Masks of the entries that training moves, by name: without the y rows of W_Q and the unit
    matrices of merged heads."""
    free = {name: np.ones(tensor.shape, bool) for name, tensor in heads.tensors.items()}
    free["W_Q"][:, heads.d_x :] = False
    if heads.merged_qk:
        del free["W_K"]
    return free


def _of_layer(
    heads: AttentionWeights, free: dict[str, np.ndarray]
) -> tuple[PromptsLoss, np.ndarray]:
    base = {name: tensor.detach().cpu().numpy() for name, tensor in heads.tensors.items()}
    ends = np.cumsum([int(mask.sum()) for mask in free.values()])
    at = np.concatenate([base[name][mask] for name, mask in free.items()])

    def function(points: Points, prompts: Prompts) -> tuple[np.ndarray, Points]:
        n_points = len(points)
        tensors = {}
        parts = dict(zip(free, np.split(points, ends[:-1], axis=1), strict=True))
        for name, values in base.items():
            filled = np.repeat(values[None], n_points, axis=0)
            if name in free:
                filled[:, free[name]] = parts[name]
            tensors[name] = torch.from_numpy(filled).flatten(0, 1)
        members = membership([heads.n_heads] * n_points)
        loss, back = by_tensors(heads.with_tensors(tensors), prompts, members)
        gradients = [
            back.tensors[name].numpy().reshape(n_points, *mask.shape)[:, mask]
            for name, mask in free.items()
        ]
        return loss.numpy(), np.concatenate(gradients, axis=1)

    return function, at


def _of_stack(stack: Weights) -> tuple[PromptsLoss, np.ndarray]:
    stack = stack.to(torch.float64)
    shapes = {name: tensor.shape for name, tensor in stack.tensors.items()}
    ends = np.cumsum([shape.numel() for shape in shapes.values()])

    def one(point: np.ndarray, prompts: Prompts) -> tuple[float, np.ndarray]:
        parts = zip(shapes.items(), np.split(point, ends[:-1]), strict=True)
        tensors = {name: torch.from_numpy(part).view(shape) for (name, shape), part in parts}
        loss, back = deep_loss(stack.with_tensors(tensors), prompts)
        return loss.item(), _flat(back.tensors, list(shapes))

    def function(points: Points, prompts: Prompts) -> tuple[np.ndarray, Points]:
        losses, gradients = zip(*(one(point, prompts) for point in points), strict=True)
        return np.array(losses), np.array(gradients)

    return function, _flat(stack.tensors, list(shapes))


def _flat(tensors: Mapping[str, Tensor], names: list[str]) -> np.ndarray:
    return np.concatenate([tensors[name].numpy(force=True).ravel() for name in names])
