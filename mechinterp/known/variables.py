"""Variables of an algorithm that a subspace of a model holds, and interchange of what it holds between prompts.

Interchange puts the part of an activation that lies in the subspace, on source prompts, into a run on base prompts (Geiger
et al. 2021, arXiv 2106.02997). If the subspace holds the variable, the prediction becomes that of the algorithm with the
variable's value on the source prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import Prompts

LOWEST = -1.0
"""Lowest R² of a subspace: a worse one counts as this."""
Pair = tuple[Prompts, Prompts]
"""Base and source prompts."""


@dataclass(frozen=True, eq=False)
class Variable:
    """A variable of an algorithm, and where a model may hold it."""

    name: str
    """Such as "prediction after layer 1"."""
    hook: str
    """Hook on the activation [prompt, pos, ...] that holds it: the stream, or the state of a recurrent layer."""
    at: int | None
    """Position, counted from the end if negative; None: all."""
    size: int
    """Dimension of its subspace."""
    path: Path
    """Hand-made model that computes the variable exactly."""
    basis: Float[np.ndarray, "size width"]
    """Basis of its subspace in that model."""

    @cached_property
    def reference(self) -> Any:
        """The hooked model that computes the variable exactly, in float64."""
        return load(self.path).model.to(torch.float64)

    def counterfactual(
        self, hooked: Any, base: Prompts, source: Prompts
    ) -> Float[Tensor, "prompt d_y"]:
        """Prediction of a model for base prompts, plus the change that the variable's value on the source prompts makes in the
        algorithm's prediction.

        Raises:
            ValueError: If base and source differ in shape.
        """
        moved = interchanged(self.reference, self, self.basis, base, source)
        return _predicted(hooked, base) + moved - _predicted(self.reference, base)


def _predicted(hooked: Any, prompts: Prompts) -> Float[Tensor, "prompt d_y"]:
    with torch.no_grad():
        return hooked.predict(prompts)


@torch.no_grad()
def interchanged(
    hooked: Any,
    variable: Variable,
    basis: Float[np.ndarray, "size width"],
    base: Prompts,
    source: Prompts,
) -> Float[Tensor, "prompt d_y"]:
    """Predictions for base prompts with what the subspace holds on the source prompts.

    Raises:
        ValueError: If base and source differ in shape.
    Example:
        >>> from mechinterp.known import suite
        >>> entry = suite(2)["gd-2"]
        >>> variable = entry.variables[0]
        >>> base, source = entry.base_and_source
        >>> basis = entry.truth.variables.value[variable.name]
        >>> changed = interchanged(entry.hooked, variable, basis, base, source)
        >>> torch.allclose(changed, variable.counterfactual(entry.hooked, base, source))
        True
    """
    if base.x.shape != source.x.shape:
        raise ValueError(
            f"base and source must have one shape, got {list(base.x.shape)} and {list(source.x.shape)}."
        )
    _, cache = hooked.run_with_cache(
        hooked.tokens(source), names_filter=lambda name: name == variable.hook
    )
    # Rows of the transposed Q are an orthonormal basis.
    Q = np.linalg.qr(np.asarray(basis, dtype=float).T).Q
    onto = torch.from_numpy(Q @ Q.T).to(cache[variable.hook])
    hook: Callable = partial(_put, source=cache[variable.hook], onto=onto, at=variable.at)
    return hooked.run_with_hooks(hooked.tokens(base), fwd_hooks=[(variable.hook, hook)])[:, -1]


def _put(own: Tensor, hook: object, *, source: Tensor, onto: Tensor, at: int | None) -> Tensor:
    rows = slice(None) if at is None else slice(at, None if at == -1 else at + 1)
    moved = (source - own)[:, rows]
    own = own.clone()
    own[:, rows] += (moved.flatten(2) @ onto).view_as(moved)
    return own


def width_of(hooked: Any, variable: Variable, prompts: Prompts) -> int:
    """Number of entries of the activation that may hold a variable, at one position of one prompt."""
    with torch.no_grad():
        _, cache = hooked.run_with_cache(
            hooked.tokens(prompts[:1]), names_filter=lambda name: name == variable.hook
        )
    return cache[variable.hook].flatten(2).shape[2]


def as_numbers(name: str, given: Any) -> Float[np.ndarray, "..."]:
    """Answer of a method under this name, as an array.

    Raises:
        ValueError: If it is no array of numbers.
    """
    try:
        return np.asarray(given, dtype=float)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be an array of numbers, got {' '.join(f'{given!r:.80}'.split())}."
        ) from None


def require_subspace(variable: Variable, basis: Any, width: int) -> Float[np.ndarray, "size width"]:
    """The basis of a subspace as an array.

    Args:
        width: Number of entries of the model's activation, which may be wider than that of the reference.
    Raises:
        ValueError: If it has another shape, is not finite or its vectors are dependent.
    """
    shape = (variable.size, width)
    given = as_numbers(f"the subspace of {variable.name!r}", basis)
    if given.shape != shape or not np.isfinite(given).all():
        raise ValueError(
            f"the subspace of {variable.name!r} must be finite numbers {list(shape)}, got an array {list(given.shape)}."
        )
    if np.linalg.matrix_rank(given) < len(given):
        raise ValueError(f"the vectors of the subspace of {variable.name!r} must be independent.")
    return given


def interchange_score(
    hooked: Any, variable: Variable, basis: np.ndarray, true: np.ndarray, pair: Pair
) -> float:
    """R² of the predictions under interchange in a subspace with those under interchange in the true one.

    0 means as far from it as the predictions without interchange; at least -1.
    """
    target = interchanged(hooked, variable, true, *pair)
    return _share(hooked, variable, basis, target, pair)


def control_score(hooked: Any, variable: Variable, basis: np.ndarray, pair: Pair) -> float:
    """R² of the predictions under interchange with the counterfactual; for random weights, which hold no variable."""
    target = variable.counterfactual(hooked, *pair)
    return _share(hooked, variable, basis, target, pair)


def _share(hooked: Any, variable: Variable, basis: np.ndarray, target: Tensor, pair: Pair) -> float:
    found = interchanged(hooked, variable, basis, *pair)
    without = _predicted(hooked, pair[0])
    left = (found - target).square().sum() / (without - target).square().sum()
    return max(float(1 - left), LOWEST)


def angle_score(basis: np.ndarray, true: np.ndarray) -> float:
    """Mean squared cosine of the principal angles between two subspaces; k / width for a random one of dimension k.

    Example:
        >>> angle_score(np.array([[2.0, 0.0]]), np.array([[1.0, 1.0]])).__round__(12)
        0.5
    """
    one, other = (np.linalg.qr(np.asarray(each, dtype=float).T).Q for each in (basis, true))
    return float((np.linalg.svd(one.T @ other, compute_uv=False) ** 2).mean())
