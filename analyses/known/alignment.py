"""Distributed alignment search (Geiger et al. 2023, arXiv 2303.02536): the subspace that holds a variable, by gradient descent.

A rotation is trained so that a run on base prompts, with the part of the activation that lies in the first rotated directions
taken from source prompts, predicts what the algorithm predicts with the variable's value on the source prompts. The rotation
is an orthogonal parametrization trained by Adam, as in the authors' library pyvene; the loss for regression is the squared
error. Their step size, 0.001, needs more than a thousand steps here; 300 steps of 0.01 go as far."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from analyses.known.gradients import Answer
from mechinterp.known import Entry
from mechinterp.known.variables import Variable

STEPS, BATCH, STEP_SIZE = 300, 64, 1e-2
N_PROMPTS = 2048
"""Number of base and of source prompts in the training set."""
SEED = 1000
"""Seed of the training prompts; those of the score have others."""
ASKED = frozenset(
    (
        *("gd-1", "gd-2", "gd-3", "gd-4", "gd-plus-plus-2", "gd-plus-plus-3"),
        *("preconditioned-2", "preconditioned-3", "preprocess-1", "preprocess-2"),
        *("gd-3-rotated", "gd-3-noise-0.01", "gd-3-noise-0.05", "preconditioned-2-noise-0.05"),
        *("mlp-carry-1", "redundant-gd-2", "opposed-gd-1", "backup-gd-2", "softmax-stack-2"),
        *(f"{name}-noise-0.05" for name in ("redundant-gd-2", "mlp-carry-1", "softmax-stack-2")),
        *("wide-gd-2", "wide-gd-3", "random-gd-3", "random-wide-gd-2"),
        *(f"recurrent-{name}" for name in ("gated", "delta", "gated-delta", "mesa")),
        *("linear-merged-s0", "linear-separate-s0", "pool-linear-m4-s0", "pool-linear-m16-s0"),
        *("softmax-h2-s0", "softmax-h4-s0", "tanh-h2-s0", "sparse-h4-noise0.1-s0"),
    )
)
"""Entries that the search is run on, chosen before their results: one or two of each kind, since each takes seconds to a
minute."""


def alignment(entry: Entry, *, seed: int = 0, steps: int = STEPS) -> Answer:
    """Basis of the subspace of each variable."""
    found = {v.name: basis_of(entry, v, seed=seed, steps=steps) for v in entry.variables}
    return {"subspace": found} if found else {}


def alignment_of_asked(entry: Entry) -> Answer:
    """Distributed alignment of the entries in `ASKED`; no answer for others."""
    return alignment(entry) if entry.name in ASKED else {}


def basis_of(entry: Entry, variable: Variable, *, seed: int, steps: int) -> np.ndarray:
    """Basis [size, width] after training."""
    data = Interchanges.of(entry, variable, seed)
    rotation = first_rotation(data, seed)
    hooked = entry.hooked

    def predicted(at: Tensor) -> Tensor:
        source = data.source_activation[at]
        hook = partial(interchange, source=source, basis=rotation.weight, at=variable.at)
        return hooked.run_with_hooks(data.base[at], fwd_hooks=[(variable.hook, hook)])[:, -1]

    train(rotation, predicted, data.target, seed=seed, steps=steps)
    return rotation.weight.detach().numpy()


@dataclass(frozen=True, eq=False)
class Interchanges:
    """Base and source prompts, and what the algorithm predicts with the variable's value interchanged."""

    variable: Variable
    base: Tensor
    """Tokens [prompt, pos, token]."""
    source: Tensor
    source_activation: Tensor
    target: Tensor

    @classmethod
    def of(cls, entry: Entry, variable: Variable, seed: int) -> "Interchanges":
        hooked = entry.hooked
        sets = [entry.sample(N_PROMPTS, SEED + 2 * seed + k) for k in range(2)]
        base, source = (hooked.tokens(prompts) for prompts in sets)
        target = variable.counterfactual(hooked, *sets)
        with torch.no_grad():
            noted = activation(hooked, source, variable)
        return cls(variable, base, source, noted, target)


def first_rotation(data: Interchanges, seed: int) -> nn.Linear:
    """Orthonormal directions [size, width] before training."""
    width = data.source_activation.flatten(2).shape[2]
    torch.manual_seed(seed)
    return orthogonal(nn.Linear(width, data.variable.size, bias=False, dtype=torch.float64))


def train(
    rotation: nn.Module,
    predicted: Callable[[Tensor], Tensor],
    target: Tensor,
    *,
    seed: int,
    steps: int,
) -> None:
    """Descend on the squared error of the predictions under interchange.

    Args:
        predicted: Function from numbers of prompts to these predictions.
    """
    optimizer = torch.optim.Adam(rotation.parameters(), lr=STEP_SIZE)
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        for _ in range(steps):
            at = torch.randint(len(target), (BATCH,), generator=generator)
            optimizer.zero_grad()
            (predicted(at) - target[at]).square().mean().backward()
            optimizer.step()


def activation(hooked: nn.Module, tokens: Tensor, variable: Variable) -> Tensor:
    _, cache = hooked.run_with_cache(tokens, names_filter=lambda name: name == variable.hook)
    return cache[variable.hook]


def interchange(
    own: Tensor, hook: object, *, source: Tensor, basis: Tensor, at: int | None
) -> Tensor:
    """The activation with its part in the span of orthonormal vectors [size, width] taken from the source."""
    rows = slice(None) if at is None else slice(at, None if at == -1 else at + 1)
    moved = (source - own)[:, rows].flatten(2)
    changed = own.clone()
    changed[:, rows] = own[:, rows] + (moved @ basis.mT @ basis).view_as(own[:, rows])
    return changed
