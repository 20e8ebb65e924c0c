"""Given loss of any PyTorch module as a function of some of its parameters, with its gradient from autograd."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from mechinterp.analysis.training.sampler import PROMPT_CHAINS, LocalLoss, Points
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import Source, predictor_of

ModuleLoss = Callable[[nn.Module], Tensor]
Chosen = dict[str, list[int] | None]
"""Parameters by name, with the chosen entries of their first axis; None means all."""


def module_loss(
    module: nn.Module,
    loss: ModuleLoss,
    *,
    weights: str | Sequence[str] = "*",
    over: str = "the given loss",
    names: Mapping[str, str] | None = None,
) -> LocalLoss:
    """Loss of a module around its parameters, in their precision.

    Chains run side by side by `torch.func.vmap`, or one by one if the module does not allow it.

    Args:
        loss: Function from the module to its loss, a tensor without axes.
        weights: Patterns of the names of the parameters that are sampled, such as
            "blocks.0.attn.W_*"; "blocks.0.attn.W_*[1]" is entry 1 of their first axis, in
            TransformerLens' weights head 1.
        over: Data of the loss, for the result.
        names: Names of parameters by the names that patterns match; None: their own names.
    Raises:
        ValueError: If no parameter has such a name, an entry does not exist, or the loss is no
            single number, does not depend on these parameters, or is random.
    Example:
        >>> xs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> layer = nn.Linear(3, 1, bias=False)
        >>> ys = layer(xs).detach()
        >>> module_loss(layer, lambda layer: (layer(xs) - ys).square().mean()).sampled
        '3 entries: *'
    """
    patterns = [weights] if isinstance(weights, str) else list(weights)
    own = {name: p.detach() for name, p in module.named_parameters()}
    named = dict(zip(own, own, strict=True)) if names is None else names
    chosen = chosen_entries({name: own[real].shape for name, real in named.items()}, patterns)
    base = {name: own[named[name]] for name in chosen}
    parts = {name: sampled_rows(base[name], rows) for name, rows in chosen.items()}
    ends = np.cumsum([part.numel() for part in parts.values()])[:-1].tolist()
    at = torch.cat([part.flatten() for part in parts.values()])
    closure = _Closure(module, loss)

    def of_one(point: Tensor) -> Tensor:
        pieces = zip(parts.items(), point.tensor_split(ends), strict=True)
        tensors = {n: _placed(base[n], piece.view_as(p), chosen[n]) for (n, p), piece in pieces}
        return functional_call(closure, {f"module.{named[n]}": t for n, t in tensors.items()}, ())

    _require_number(of_one, at)
    batched = _batched(of_one, at)

    def function(points: Points) -> tuple[np.ndarray, Points]:
        gradients, losses = batched(torch.from_numpy(points).to(at))
        return losses.double().numpy(force=True), gradients.double().numpy(force=True)

    return LocalLoss(
        function,
        at.double().numpy(force=True),
        f"{at.numel()} entries: {', '.join(patterns)}",
        over,
        unknown="there is no closed form for the loss of a module",
        remedy="; settle=True goes to a minimum first",
        chains=PROMPT_CHAINS,
        first_look=function,
    )


def predictor_loss(source: Source, prompts: Prompts, *, weights: str | Sequence[str]) -> LocalLoss:
    """Mean squared error of a model on fixed prompts, as a function of some of its parameters.

    Models of this package without hooks run in float64, and in float32 for draws; a hooked module in its own
    precision, under the names that its parameters have there.
    """
    predictor = predictor_of(source)
    own = predictor.weights
    if own is None or predictor.is_hooked:
        return _through_hooks(predictor.hooked, prompts, weights)
    double, single = (
        _through_hooks(predictor_of(own.to(dtype)).hooked, prompts.to(dtype), weights)
        for dtype in (torch.float64, torch.float32)
    )
    return replace(double, first_look=single.function, in_float32=single.function)


def _through_hooks(
    hooked: HookedPredictor, prompts: Prompts, weights: str | Sequence[str]
) -> LocalLoss:
    """Mean squared error of a hooked model in its own precision."""
    model: Any = hooked.model
    inputs = hooked.inputs(prompts)

    def loss(_: nn.Module) -> Tensor:
        """Loss of the hooked model."""
        prediction = hooked.prediction(model(inputs), prompts)
        return (prediction - prompts.y_query.to(prediction)).square().mean()

    return module_loss(
        model,
        loss,
        weights=weights,
        over=f"{len(prompts)} prompts",
        names=None if isinstance(model, ICLTransformer) else model.parameter_names,
    )


class _Closure(nn.Module):
    """A module whose forward is the loss of the module inside."""

    def __init__(self, module: nn.Module, loss: ModuleLoss) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self) -> Tensor:
        return self.loss(self.module)


def _placed(base: Tensor, part: Tensor, rows: list[int] | None) -> Tensor:
    """The parameter with the chosen entries of its first axis replaced."""
    if rows is None:
        return part
    own = dict(zip(rows, part, strict=True))
    return torch.stack([own.get(row, base[row]) for row in range(len(base))])


def _batched(of_one: Callable[[Tensor], Tensor], at: Tensor) -> Callable[[Tensor], tuple]:
    """Gradients and losses at many points: side by side, or one by one if that fails."""
    alone = grad_and_value(of_one)

    # Torch's own attention has no batching rule but in this form: it would run point by point, with a warning.
    @sdpa_kernel(SDPBackend.MATH)
    def together(points: Tensor) -> tuple:
        return vmap(alone)(points)

    try:
        together(at[None].repeat(2, 1))
    except (RuntimeError, ValueError, NotImplementedError):
        # For example control flow that reads a number.
        return lambda points: tuple(map(torch.stack, zip(*map(alone, points), strict=True)))
    return together


def _require_number(of_one: Callable[[Tensor], Tensor], at: Tensor) -> None:
    # Both with gradients, as torch may take another kernel without.
    with torch.enable_grad():
        found, again = (of_one(at.clone().requires_grad_()) for _ in range(2))
    if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"loss must give a tensor without axes, got {got}.")
    if found.grad_fn is None:
        raise ValueError("loss must depend on the sampled parameters, got a loss without gradient.")
    if not torch.equal(again, found):
        raise ValueError(f"loss must be the same at each call, got {found.item():g} and {again.item():g}; is a dropout in training mode?")  # fmt: skip


def sampled_rows(parameter: Tensor, rows: list[int] | None) -> Tensor:
    """Chosen entries of the first axis of a parameter; None means all."""
    return parameter if rows is None else parameter[rows]


def chosen_entries(shapes: Mapping[str, torch.Size], patterns: Sequence[str]) -> Chosen:
    """Parameters that match, in the order of the given shapes.

    Raises:
        ValueError: If a pattern matches nothing, or an entry does not exist.
    Example:
        >>> chosen_entries({"W_Q": torch.Size([2, 6]), "W_K": torch.Size([2, 6])}, ["W_K[1]"])
        {'W_K': [1]}
    """
    chosen: Chosen = {}
    for pattern in patterns:
        inside = re.fullmatch(r"(.*)\[(\d+)\]", pattern)
        glob, row = (inside[1], int(inside[2])) if inside else (pattern, None)
        found = [name for name in shapes if fnmatchcase(name, glob)]
        if not found:
            some = ", ".join(list(shapes)[:6])
            raise ValueError(f"weights must match parameters of the module ({some}, ...), got {pattern!r}.")  # fmt: skip
        for name in found:
            if row is None:
                chosen[name] = None
            elif row >= (shapes[name][:1] or (0,))[0]:
                raise ValueError(f"weights must name an entry below {list(shapes[name])[:1]} of {name}, got {row}.")  # fmt: skip
            elif (rows := chosen.setdefault(name, [])) is not None and row not in rows:
                rows.append(row)
    return {name: chosen[name] for name in shapes if name in chosen}
