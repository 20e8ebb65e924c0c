"""Number of heads of a third-party module's attention, counted in its softmax."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mechinterp.models.hooked.followed import SOFTMAX
from mechinterp.models.hooked.module import first_tensor


def heads_in_softmax(module: nn.Module, output: str, container: str, tokens: Tensor) -> int:
    """Number of heads in the only softmax of a part; 0 if there is none over [batch, head, query, key], or several.

    Differential attention has two softmaxes for each head. So the first head of the softmax is set to 0: if this changes
    2/n of the heads' outputs, there are n/2 heads. If it changes all outputs, heads are mixed (talking heads), and the number
    is that of the softmax.

    Args:
        output: Name of the module that takes the heads' outputs.
        container: Name of the part.
    """
    seen, before = _Softmaxes.of(module, output, container, tokens, without_first=False)
    if len(seen) != 1:
        return 0
    _, after = _Softmaxes.of(module, output, container, tokens, without_first=True)
    changed, width = int((before != after).flatten(0, -2).any(0).sum()), before.shape[-1]
    if changed * seen[0] <= width or changed == width:
        return seen[0]
    return 0 if width % changed else width // changed


class _Softmaxes(TorchFunctionMode):
    """Records the number of heads of each softmax over [batch, head, query, key] in a part of a module."""

    def __init__(self, n_prompts: int, without_first: bool) -> None:
        super().__init__()
        self.n_prompts, self.without_first = n_prompts, without_first
        self.inside, self.seen = False, list[int]()

    @classmethod
    def of(
        cls, module: nn.Module, output: str, container: str, tokens: Tensor, without_first: bool
    ) -> tuple[list[int], Tensor]:
        """Numbers of heads of the softmaxes in the first run of a part, and the heads' outputs."""
        mode, part = cls(len(tokens), without_first), module.get_submodule(container)
        runs: list[int] = []
        outputs: list[Tensor] = []

        def enter(*_: Any) -> None:
            runs.append(len(mode.seen))
            mode.inside = len(runs) == 1

        def leave(*_: Any) -> None:
            mode.inside = False

        def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
            outputs.append((args[0] if args else kwargs[first_tensor(kwargs)]).detach().clone())

        handles = (
            part.register_forward_pre_hook(enter),
            part.register_forward_hook(leave),
            module.get_submodule(output).register_forward_pre_hook(note, with_kwargs=True),
        )
        with mode:
            module(tokens)
        for handle in handles:
            handle.remove()
        return mode.seen, outputs[0]

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Make the call and record its number of heads."""
        result = func(*args, **(kwargs or {}))
        if self.inside and args and func in (*SOFTMAX, F.scaled_dot_product_attention):
            axes, n = result.ndim, self.n_prompts
            if (axes == 4 and len(result) == n) or (axes == 3 and len(result) % n == 0):
                by_head = result if axes == 4 else result.unflatten(0, (n, -1))
                self.seen.append(by_head.shape[1])
                if self.without_first:
                    kept = torch.ones_like(by_head)
                    kept[:, 0] = 0
                    return (by_head * kept).reshape(result.shape)
        return result
