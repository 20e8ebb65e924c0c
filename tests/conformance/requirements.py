"""What checks of a hooked model share: the inputs they draw, and what they require."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# A module of any class: that it lacks something is for the checks to find out.
Module = Any
Check = Callable[[Module], None]

BATCH = 3
TOLERANCE = 1e-4


def sample_inputs(
    model: Module,
) -> tuple[Float[Tensor, "batch pos d"], Float[Tensor, "batch pos d"]]:
    """Two sets of random inputs with more positions than entries, so that no axis passes for another."""
    cfg = model.cfg
    generator = torch.Generator(device="cpu").manual_seed(0)
    # No more than the model has positions for, and fewer than n_ctx, as some tools want it.
    n_pos = min(cfg.d_model + 2, most_positions(model), getattr(cfg, "n_ctx", sys.maxsize) - 1)
    # A model with a read-in takes tokens of another width than its stream's.
    shape = (2, BATCH, n_pos, getattr(cfg, "d_token", cfg.d_model))
    clean, corrupted = torch.randn(
        *shape, generator=generator, dtype=torch.float32, device="cpu"
    ).to(cfg.device, cfg.dtype)
    return clean, corrupted


def most_positions(model: Module) -> int:
    """Number of positions that the model has learned, if it has learned any."""
    n_positions = getattr(getattr(model.cfg, "model", None), "n_positions", None)
    return sys.maxsize if n_positions is None else n_positions


def require(holds: bool, reason: str) -> None:
    """Raises AssertionError with the reason unless the condition holds."""
    if not holds:
        raise AssertionError(reason)


def require_close(values: Tensor, expected: Tensor, what: str) -> None:
    """Raises AssertionError unless the two are equal up to rounding."""
    shapes = f"{what}: shape {list(values.shape)} instead of {list(expected.shape)}"
    require(values.shape == expected.shape, shapes)
    off = (values.double() - expected.double()).abs().max().item()
    # Not `off > ...`, which NaN would pass.
    close = off <= TOLERANCE * max(1.0, expected.abs().max().item())
    require(close, f"{what}: off by {off:.2g}")


def require_sum(model: Module) -> None:
    """Raises AssertionError if the stream is no sum of what the parts of the model write."""
    single = (getattr(block, "hook_out_is_single_residual_stream", True) for block in model.blocks)
    reason = "does not apply: norms after each layer, the stream is no sum of its parts"
    require(all(single), reason)


def read_out(model: Module, stream: Tensor) -> Tensor:
    """The output of a model for its last stream: through the last norm, if there is one, and W_U."""
    norm = getattr(model, "ln_final", None)
    return (stream if norm is None else norm(stream)) @ model.W_U + model.b_U


def replace_at(index: tuple, value: Tensor | float) -> Callable[[Tensor, object], Tensor]:
    """A hook that puts the value (or its entries at the same index) at this index of a copy."""

    def hook(values: Tensor, hook: object) -> Tensor:
        values = values.clone()
        values[index] = value[index] if isinstance(value, Tensor) else value
        return values

    return hook


@contextmanager
def switched_on(model: Module, *switches: str) -> Iterator[None]:
    """Turns `cfg.use_...` settings on by the model's setters, and back to what they were."""
    before = {switch: getattr(model.cfg, switch) for switch in switches}
    try:
        for switch in switches:
            getattr(model, f"set_{switch}")(True)
        yield
    finally:
        for switch, value in before.items():
            if getattr(model.cfg, switch) != value:
                getattr(model, f"set_{switch}")(value)
