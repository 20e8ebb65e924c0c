"""Torch calls outside the layers of a module. If the sums with the stream are among them, their results are the stream."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mechinterp.models.hooked.followed import Running

_SUMS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__)


class Calls(TorchFunctionMode):
    """Context that numbers torch calls and may change what they return.

    Calls within a layer are not counted, nor are those that return anything but numbers [batch, pos, width]. So the numbers do
    not depend on hooks of heads.

    Args:
        through: Function from the number of a call, True for a sum of two such tensors, and the result of the call to the
            result that the module gets.
    """

    def __init__(self, running: Running, through: Callable[[int, bool, Tensor], Tensor]) -> None:
        super().__init__()
        self.running, self.through, self.number = running, through, -1

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Result of the call, after `through` if it counts."""
        result = func(*args, **(kwargs or {}))
        stream = isinstance(result, Tensor) and result.ndim == 3 and result.is_floating_point()
        if self.running.depth or not stream:
            return result
        self.number += 1
        shapes = [each.shape for each in args if isinstance(each, Tensor)]
        return self.through(self.number, func in _SUMS and shapes == [result.shape] * 2, result)
