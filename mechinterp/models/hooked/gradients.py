"""Check that gradients pass from the prediction of a plain module to its hook points."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from mechinterp.models.hooked.runner import HookedPredictor

CUT = "forward cuts it by torch.no_grad(), .detach(), .data or numpy behind that place; leave that out"
NO_CHECKPOINTS = "turn gradient checkpointing off (model.gradient_checkpointing_disable(), or call layers without torch.utils.checkpoint)"
RAN_AGAIN = "must run as often"
"""Words of the error of `ModuleHooks` if a block runs again, as it does in the backward pass of a checkpoint."""
CURES = {
    "checkpoint": NO_CHECKPOINTS,
    RAN_AGAIN: NO_CHECKPOINTS,
    "saved tensor hooks": NO_CHECKPOINTS,
    "setup_context staticmethod": NO_CHECKPOINTS,
    "inplace": "write x = x + y in forward, not x += y",
    "numpy": "use torch in forward, not numpy",
}
"""Cure in a module, by words of torch's error."""


@contextmanager
def gradients_explained() -> Iterator[None]:
    """Context in which torch's errors about gradients become one line with the cure.

    Raises:
        ValueError: If the module fails when it runs with gradients.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        cure = next((cure for words, cure in CURES.items() if words in text), None)
        if cure is None or (isinstance(error, ValueError) and RAN_AGAIN not in text):
            raise
        raise ValueError(
            f"this needs gradients through the module, got: {text:.160}; {cure}."
        ) from None


@torch.enable_grad()
def require_gradients(hooked: HookedPredictor, inputs: Tensor, names: Iterable[str]) -> None:
    """Refuse a module whose prediction has no gradient at a hook point.

    Args:
        inputs: Input of a few prompts.
        names: Hook points.
    Raises:
        ValueError: If there is no gradient, or the module fails when it runs with gradients.
    """
    seen: dict[str, Tensor] = {}

    def keep(values: Tensor, hook: object, *, name: str) -> Tensor:
        seen[name] = values
        return values

    hooks: list[tuple] = [(name, partial(keep, name=name)) for name in dict.fromkeys(names)]
    with gradients_explained():
        tokens = inputs.detach().requires_grad_()
        prediction = hooked.read(hooked.run(tokens, hooks))
        reached = _reached(prediction, seen)
    for name in seen:
        if name not in reached:
            raise ValueError(
                f"this needs the gradient of the prediction at {name}, which is none: {CUT}."
            )


def _reached(prediction: Tensor, seen: Mapping[str, Tensor]) -> set[str]:
    """Names of the values at which the prediction has a gradient."""
    behind = {name: values for name, values in seen.items() if values.requires_grad}
    if not prediction.requires_grad or not behind:
        return set()
    found = torch.autograd.grad(prediction.sum(), list(behind.values()), allow_unused=True)
    return {n for n, gradient in zip(behind, found, strict=True) if gradient is not None}
