"""Loss of a model on one fixed set of prompts as a function of its weights, with the gradient of training.

This gradient is several times as fast as one through the hooks, and draws take it in float32.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from mechinterp.analysis.training.module_losses import chosen_entries, sampled_rows
from mechinterp.analysis.training.sampler import PROMPT_CHAINS, LocalLoss, Points
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import require_memory
from mechinterp.models.heads import stack
from mechinterp.models.run.general import pass_bytes
from mechinterp.models.weights import Weights, by_layer
from mechinterp.training.general.step import loss_and_gradients as deep_loss
from mechinterp.training.one_layer.step import by_tensors, membership
from mechinterp.training.one_layer.step import loss_and_gradients as one_layer_loss
from mechinterp.training.run import flattened, views


def prompts_loss(
    weights: Weights, prompts: Prompts, patterns: str | Sequence[str] | None = None
) -> LocalLoss:
    """Mean squared error of a model on fixed prompts around its weights: in float64, and in float32 for draws.

    Args:
        patterns: Patterns of the names of the tensors that are sampled, such as "blocks.0.attn.W_*[1]" for head 1; None: all
            entries that training moves.
    Raises:
        ValueError: If no tensor has such a name, an entry does not exist, or a gradient does not fit into memory.
    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> checkpoint = load("checkpoints/garg-tiny-s0")
        >>> prompts = draw_prompts(checkpoint.task, 4)
        >>> prompts_loss(checkpoint.weights, prompts, "unembed.*").sampled
        '65 entries: unembed.*'
    """
    weights, prompts, model = weights.to(torch.float64), prompts.to(torch.float64), weights.model
    if model.stack != "linear" and not model.trains_compiled:
        length = prompts.x.shape[1]
        needed = len(prompts) * pass_bytes(weights, length)
        require_memory(needed, f"a gradient on {len(prompts)} prompts of {length} pairs at once")
    free, sampled = _free_entries(weights, patterns)
    start, single = flattened(weights), prompts.to(torch.float32)

    def of(points: Points, prompts: Prompts) -> tuple[np.ndarray, Points]:
        flat = start.to(prompts.x).repeat(len(points), 1)
        flat[:, free] = torch.from_numpy(points).to(flat)
        pairs = _at_points([views(row, weights) for row in flat], prompts)
        losses, rows = zip(*((loss, flattened(back)[free]) for loss, back in pairs), strict=True)
        return _as_numbers(losses), _as_numbers(rows)

    def of_some(points: Points, n_prompts: int, generator: torch.Generator) -> Points:
        rows = torch.randint(
            len(prompts), (len(points), n_prompts), generator=generator, device=generator.device
        )
        pairs = zip(points, rows, strict=True)
        return np.concatenate([of(point[None], prompts[chosen])[1] for point, chosen in pairs])

    def in_float32(points: Points) -> tuple[np.ndarray, Points]:
        return of(points, single)

    return LocalLoss(
        lambda points: of(points, prompts),
        start[free].numpy(force=True),
        f"{len(free)} entries: {sampled}",
        f"{len(prompts)} prompts",
        unknown="the loss on prompts is not a quadratic in one matrix",
        remedy="; settle=True goes to a minimum on these prompts first",
        on_minibatch=of_some,
        chains=PROMPT_CHAINS,
        first_look=None if model.trains_compiled else in_float32,
        in_float32=in_float32,
    )


def _free_entries(
    weights: Weights, patterns: str | Sequence[str] | None
) -> tuple[Int[Tensor, " entry"], str]:
    """Places of the sampled entries among all weights in one row, and their names."""
    places = torch.arange(len(flattened(weights)), device=weights.device)
    tensors = dict(views(places, weights).tensors)
    if patterns is not None:
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        named = by_layer(tensors, weights.n_layers)
        chosen = chosen_entries({name: each.shape for name, each in named.items()}, patterns)
        parts = [sampled_rows(named[name], rows) for name, rows in chosen.items()]
        return torch.cat([part.flatten() for part in parts]), ", ".join(patterns)
    if not weights.model.trains_compiled:
        return places, "all"
    # Training moves neither the y rows of W_Q nor the x columns of W_O.
    first, *others, last = tensors
    tensors[first] = tensors[first][:, :, : weights.d_x]
    tensors[last] = tensors[last][..., weights.d_x :]
    short = [name.removeprefix("attn.") for name in (first, *others, last)]
    sampled = f"the x entries of {short[0]}, and {', '.join(short[1:-1])} and {short[-1]}"
    return torch.cat([each.flatten() for each in tensors.values()]), sampled


def _as_numbers(rows: Sequence[Tensor]) -> np.ndarray:
    return torch.stack(list(rows)).double().numpy(force=True)


def _at_points(models: list[Weights], prompts: Prompts) -> Iterator[tuple[Tensor, Weights]]:
    """Loss and gradient of each of these models of one architecture."""
    first = models[0]
    if not first.model.trains_compiled:
        yield from (deep_loss(model, prompts) for model in models)
        return
    # Heads of all models side by side; the compiled step does not know merged heads.
    step = by_tensors if first.model.merged_qk else one_layer_loss
    losses, back = step(stack(models), prompts, membership([first.n_heads] * len(models)))
    for index, loss in enumerate(losses):
        yield loss, back[index * first.n_heads : (index + 1) * first.n_heads]
