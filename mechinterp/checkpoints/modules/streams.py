"""Residual stream of a module whose sums with it stand outside the modules of its layers, found by running it."""

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from mechinterp.models.hooked.module import ModuleHooks
from mechinterp.models.hooked.query_position import decides
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.hooked.stream_calls import Calls


@dataclass(frozen=True, eq=False)
class _Call:
    """Torch call outside the layers."""

    number: int
    is_sum: bool
    """True if it adds two tensors of the shape of its result."""
    layer: int
    """Number of layers that ran before it."""
    result: Tensor


@torch.no_grad()
def find_stream(hooked: HookedPredictor, model: ModuleHooks, inputs: Tensor) -> None:
    """Let the hook points of the stream see results of torch calls, if the layers' outputs are not the stream.

    The stream after a layer is then the last sum before the next layer that decides the prediction. Before the first layer it
    is the last result of any call that does. If one of them is missing, or the module fails on other inputs, nothing changes.
    """
    layers = range(hooked.n_layers + 1)
    last = hooked.stream_name(layers[-1])
    found: list[_Call | None] = [None]
    with suppress(AssertionError, IndexError, RuntimeError, ValueError):
        _, noted = hooked.run_noting(inputs, [last])
        if decides(hooked, inputs, layers[-1], noted[last]):
            return
        calls = _calls(model, inputs)
        found = [_stream_after(hooked, model, inputs, layer, calls) for layer in layers]
    whole = None not in found
    model.running.stream_calls = {each.number: each.layer for each in found if each and whole}


def _calls(model: ModuleHooks, inputs: Tensor) -> list[_Call]:
    """Calls outside the layers on these inputs, in order of running."""
    calls: list[_Call] = []

    def note(number: int, is_sum: bool, result: Tensor) -> Tensor:
        # A copy, because the module may write into it.
        calls.append(_Call(number, is_sum, model.running.begun, result.clone()))
        return result

    with Calls(model.running, note):
        model(inputs)
    return calls


def _stream_after(
    hooked: HookedPredictor, model: ModuleHooks, inputs: Tensor, layer: int, calls: list[_Call]
) -> _Call | None:
    """Call that returns the stream after this number of layers; None if there is none."""
    for call in reversed(calls):
        if call.layer == layer and (layer == 0 or call.is_sum):
            model.running.stream_calls = {call.number: layer}
            if decides(hooked, inputs, layer, call.result):
                return call
    return None
