"""Refusals of a tensor, with the advice how to state its part, and of tensors without finite numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.tensors.names import KNOWN, shown
from mechinterp.checkpoints.io.files import naming
from mechinterp.checkpoints.io.headers import require_finite

HOOK = "hook the module in memory (mechinterp.hook_module)"


class TensorError(ValueError):
    """Refused tensor of a file; the error message adds how to state which part it is (--map)."""

    def __init__(self, what: str, rule: str, *, offer: bool = True) -> None:
        self.rule = f"{shown(what)} {rule}".lstrip()
        self.offer = offer
        super().__init__(f"{self.rule}.")


@contextmanager
def of_file(file: Path) -> Iterator[None]:
    """Puts the file's name before errors inside; errors about a tensor also say how to state its
    part."""
    with naming(file):
        try:
            yield
        except TensorError as error:
            if not error.offer:
                raise ValueError(f"{error.rule}; {HOOK}.") from None
            raise ValueError(
                f"{error.rule}; state its part by --map THEIRS=KNOWN (map=), such as --map my_queries=q_proj, "
                f"where KNOWN is one of {', '.join(KNOWN)}."
            ) from None


def require_numbers(tensor: Tensor, what: str) -> None:
    """Refuse a tensor unless it has finite floating-point numbers."""
    if not tensor.is_floating_point():
        raise ValueError(f"{shown(what)} must hold floating-point numbers, got {tensor.dtype}.")
    if bad := int((~torch.isfinite(tensor)).sum()):
        require_finite(shown(what), bad)
