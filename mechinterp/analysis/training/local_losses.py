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
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.training.module_losses import ModuleLoss, module_loss, predictor_loss
from mechinterp.analysis.training.sampler import PROMPT_CHAINS, BatchLoss, LocalLoss, Points
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.config import TaskConfig
from mechinterp.display import counted
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.memory import require_memory
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.general import pass_bytes
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights
from mechinterp.theory.learning_coefficient import (
    learning_coefficient,
    map_rank,
    reachable_dimension,
)
from mechinterp.theory.linear import Heads, MergedHeads, Moments
from mechinterp.training.general.step import loss_and_gradients as deep_loss
from mechinterp.training.linear import flat_heads, unflatten
from mechinterp.training.linear_models import sample_moments, task_moments
from mechinterp.training.one_layer.step import by_tensors, membership


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
    if weights is None and isinstance(source, Checkpoint):
        # The gradient of training is 150 times as fast for one layer as one through the hooks, and
        # several times for others. A recurrent layer on tokens (x, y) has weights that nothing reads.
        model = source.config.model
        if model.trains_compiled or not model.reads_y_alone:
            return prompts_loss(source, drawn)
    return predictor_loss(source, drawn, weights=weights or "*")


def quick_parts(
    source: Source, prompts: Prompts | None, n_prompts: int, seed: int
) -> Iterator[LocalLoss]:
    """Losses of small parts of a model's weights on the same prompts: a head of the last layer, and the read-out."""
    drawn = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    hooked = predictor_of(source).hooked
    names = [name for name, _ in hooked.model.named_parameters()]
    for name in (f"blocks.{hooked.n_layers - 1}.attn.W_*", "unembed.W_U"):
        if any(fnmatchcase(own, name) for own in names):
            pattern = f"{name}[0]" if "attn" in name else name
            yield predictor_loss(source, drawn, weights=pattern)


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


def prompts_loss(checkpoint: Checkpoint, prompts: Prompts) -> LocalLoss:
    """Loss of a model on fixed prompts, with the gradient of training; of one layer of attention where training moves it."""
    prompts = prompts.to(torch.float64)
    weights = checkpoint.weights.to(torch.float64)
    if weights.model.stack != "linear" and not weights.model.one_attention:
        length = prompts.x.shape[1]
        needed = len(prompts) * pass_bytes(weights, length)
        require_memory(needed, f"a gradient on {len(prompts)} prompts of {length} pairs at once")
    base = {name: tensor.numpy(force=True) for name, tensor in weights.tensors.items()}
    free = {name: np.ones(values.shape, bool) for name, values in base.items()}
    sampled = "all"
    if weights.model.one_attention:
        # Training moves neither the y rows of W_Q nor the x columns of W_O.
        first, *others, last = (name.removeprefix("attn.") for name in free)
        free[f"attn.{first}"][:, :, weights.d_x :] = False
        free["attn.W_O"][..., : weights.d_x] = False
        sampled = f"the x entries of {first}, and {', '.join(others)} and {last}"
    at = np.concatenate([base[name][mask] for name, mask in free.items()])
    ends = np.cumsum([int(mask.sum()) for mask in free.values()])[:-1]

    def of(points: Points, prompts: Prompts) -> tuple[np.ndarray, Points]:
        tensors = {}
        parts = dict(zip(free, np.split(points, ends, axis=1), strict=True))
        for name, values in base.items():
            filled = np.repeat(values[None], len(points), axis=0)
            if name in free:
                filled[:, free[name]] = parts[name]
            tensors[name] = torch.from_numpy(filled).to(prompts.x)
        loss, gradients = _at_points(weights, tensors, prompts)
        flat = [gradients[name].double().numpy()[:, mask] for name, mask in free.items()]
        return loss.double().numpy(), np.concatenate(flat, axis=1)

    def of_some(points: Points, n_prompts: int, generator: torch.Generator) -> Points:
        rows = torch.randint(
            len(prompts), (len(points), n_prompts), generator=generator, device=generator.device
        )
        pairs = zip(points, rows, strict=True)
        return np.concatenate([of(point[None], prompts[chosen])[1] for point, chosen in pairs])

    single = prompts.to(torch.float32)
    quick = None if weights.model.one_attention else lambda points: of(points, single)
    return LocalLoss(
        lambda points: of(points, prompts),
        at,
        f"{at.size} entries: {sampled}",
        f"{len(prompts)} prompts",
        unknown="the loss on prompts is not a quadratic in one matrix",
        remedy="; settle=True goes to a minimum on these prompts first",
        on_minibatch=of_some,
        chains=PROMPT_CHAINS,
        first_look=quick,
        in_float32=quick,
    )


def _at_points(
    weights: Weights, tensors: dict[str, Tensor], prompts: Prompts
) -> tuple[Float[Tensor, " point"], dict[str, Tensor]]:
    """Loss and gradients of models whose tensors have a first axis for the points."""
    n_points = len(next(iter(tensors.values())))
    if weights.model.one_attention:  # heads of all points side by side
        members = membership([weights.n_heads] * n_points)
        flat = {name: tensor.transpose(0, 1).flatten(1, 2) for name, tensor in tensors.items()}
        loss, back = by_tensors(weights.of_heads(flat), prompts, members)
        parts = {name: t.unflatten(1, (n_points, -1)) for name, t in back.tensors.items()}
        return loss, {name: part.transpose(0, 1) for name, part in parts.items()}
    models = [weights.with_tensors({n: t[i] for n, t in tensors.items()}) for i in range(n_points)]
    losses, backs = zip(*(deep_loss(model, prompts) for model in models), strict=True)
    return torch.stack(losses), {n: torch.stack([b.tensors[n] for b in backs]) for n in tensors}
