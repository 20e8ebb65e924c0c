"""Check that modules take the heads' outputs, and not the residual stream or the hidden units of an
MLP."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mechinterp.models.hooked.module import first_tensor


class _Marked(torch.autograd.Function):
    """Marks the stream, so that it is recognised in values computed from it."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor) -> Tensor:
        return stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


# Names of autograd's operations, without "Backward0".
SUMS = [
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Rsqrt",
    "NativeLayerNorm",
    "FusedRms",
    "FusedRmsNorm",
    "NativeGroupNorm",
    "NativeDropout",
]
SHAPES = [
    "View",
    "UnsafeView",
    "Reshape",
    "ReshapeAlias",
    "Transpose",
    "Permute",
    "Clone",
    "T",
    "Slice",
    "Select",
    "Unsqueeze",
    "Squeeze",
    "Expand",
    "ToCopy",
    "Cat",
    "Alias",
    "Split",
    "SplitWithSizes",
    "Unbind",
    "Index",
    "Stack",
]
HIDDEN = ["Gelu", "Relu", "Silu", "Tanh", "Sigmoid", "Elu", "Softplus", "LeakyRelu"]
PROJECTIONS = {"AddmmBackward0", "MmBackward0"}


def require_heads_outputs(module: nn.Module, blocks: dict[str, str], tokens: Tensor) -> None:
    """Refuse modules whose input is the stream or hidden units; outputs of heads are products of
    weights and values.

    Sums, norms, shape changes and activations are traced back to the products behind them.

    Raises:
        ValueError: If there is such a module; the message names the first one.
    """
    entered: dict[str, Tensor] = {}

    def mark(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (_Marked.apply(args[0]), *args[1:]), kwargs
        first = first_tensor(kwargs)
        return args, {**kwargs, first: _Marked.apply(kwargs[first])}

    def note(_: nn.Module, args: tuple, kwargs: dict, *, name: str) -> None:
        entered.setdefault(name, args[0] if args else kwargs[first_tensor(kwargs)])

    others = [n for n in blocks if not isinstance(module.get_submodule(n), nn.MultiheadAttention)]
    handles = []
    for name in others:
        block = module.get_submodule(blocks[name])
        handles.append(block.register_forward_pre_hook(mark, with_kwargs=True))
        part, into = module.get_submodule(name), lambda *given, name=name: note(*given, name=name)
        handles.append(part.register_forward_pre_hook(into, with_kwargs=True))
    with torch.enable_grad():
        module(tokens.detach().clone().requires_grad_())
    for handle in handles:
        handle.remove()
    for name, values in entered.items():
        made_of = set(_factors(values.grad_fn))
        what = "hidden units" if made_of and made_of <= PROJECTIONS else ""
        what = "the residual stream" if "_MarkedBackward" in made_of else what
        if what:
            raise ValueError(
                f"outputs must name modules whose input is the heads' outputs side by side; the input of {name!r} is {what}."
            )


def _factors(node: Any) -> Iterator[str]:
    """Names of the operations behind sums, norms, shape changes and activations."""
    seen, ahead = set(), [node]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name().rpartition("::")[2]
        kind = name.partition("Backward")[0].strip("_")
        if kind in SUMS or kind in SHAPES or kind in HIDDEN:
            ahead.extend(each for each, _ in node.next_functions)
        else:
            yield name
