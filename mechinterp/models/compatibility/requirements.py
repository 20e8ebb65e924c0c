"""Shared parts of the compatibility checks: random inputs and requirements."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# A module of any class; the checks report what it lacks.
Module = Any
Check = Callable[[Module], None]

BATCH = 3
TOLERANCE = 1e-4


def sample_inputs(
    model: Module,
) -> tuple[Float[Tensor, "batch pos d"], Float[Tensor, "batch pos d"]]:
    """Clean and corrupted random inputs, with sizes that differ between axes so that swapped axes are noticed."""
    cfg = model.cfg
    generator = torch.Generator(device="cpu").manual_seed(0)
    # At most the model's positions, and fewer than n_ctx, which some tools require.
    n_pos = min(cfg.d_model + 2, most_positions(model), getattr(cfg, "n_ctx", sys.maxsize) - 1)
    # With a read-in, tokens and stream differ in width.
    shape = (2, BATCH, n_pos, getattr(cfg, "d_token", cfg.d_model))
    clean, corrupted = torch.randn(
        *shape, generator=generator, dtype=torch.float32, device="cpu"
    ).to(cfg.device, cfg.dtype)
    return clean, corrupted


def most_positions(model: Module) -> int:
    """Number of learned positions; unlimited if the model has none."""
    n_positions = getattr(getattr(model.cfg, "model", None), "n_positions", None)
    return sys.maxsize if n_positions is None else n_positions


def require(holds: bool, reason: str) -> None:
    """Raises AssertionError with the reason if the condition is false."""
    if not holds:
        raise AssertionError(reason)


def require_close(values: Tensor, expected: Tensor, what: str) -> None:
    """Raises AssertionError unless the two tensors are equal up to rounding."""
    shapes = f"{what}: shape {list(values.shape)} instead of {list(expected.shape)}"
    require(values.shape == expected.shape, shapes)
    off = (values.double() - expected.double()).abs().max().item()
    # Not `off > ...`: a NaN would pass.
    close = off <= TOLERANCE * max(1.0, expected.abs().max().item())
    require(close, f"{what}: off by {off:.2g}")


def require_sum(model: Module) -> None:
    """Raises AssertionError if the residual stream is not the sum of the parts that write to it."""
    single = (getattr(block, "hook_out_is_single_residual_stream", True) for block in model.blocks)
    reason = "does not apply: norms after each layer, the stream is no sum of its parts"
    require(all(single), reason)


def read_out(model: Module, stream: Tensor) -> Tensor:
    """Output of a model for its last stream: last norm, if there is one, then W_U and b_U."""
    norm = getattr(model, "ln_final", None)
    return (stream if norm is None else norm(stream)) @ model.W_U + model.b_U


def replace_at(index: tuple, value: Tensor | float) -> Callable[[Tensor, object], Tensor]:
    """Hook that replaces this index of a copy by the value, or by the value's entries at the same index."""

    def hook(values: Tensor, hook: object) -> Tensor:
        values = values.clone()
        values[index] = value[index] if isinstance(value, Tensor) else value
        return values

    return hook


@contextmanager
def switched_on(model: Module, *switches: str) -> Iterator[None]:
    """Context in which `cfg.use_...` switches are on; they are restored afterwards."""
    before = {switch: getattr(model.cfg, switch) for switch in switches}
    try:
        for switch in switches:
            getattr(model, f"set_{switch}")(True)
        yield
    finally:
        for switch, value in before.items():
            if getattr(model.cfg, switch) != value:
                getattr(model, f"set_{switch}")(value)
