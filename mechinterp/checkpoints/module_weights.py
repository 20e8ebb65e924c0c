"""The weights of a hooked module by name, proven by the module's own predictions.

The module's state dict is read like a file. Names and shapes leave choices open, such as norms before or after a layer. A
reading is taken only if it gives the module's predictions, whole and with each head masked.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import read_proven
from mechinterp.checkpoints.foreign.recorded import Recording, recording_of
from mechinterp.checkpoints.module_function import HALF
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.predictor import Predictor, WeightsPredictor
from mechinterp.models.run.predictor import Source as Model
from mechinterp.models.weights import HEADS, Weights

N_PROMPTS = 32
"""Number of prompts of the proof at each length."""


def by_weights(model: Model) -> Model:
    """The model; for a hooked module whose weights are proven, a predictor by these weights.

    Example:
        >>> from mechinterp import TaskConfig, hook_module
        >>> layer = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        >>> by_weights(hook_module(layer, task=TaskConfig())).weights
        Weights(1 x 2 heads, d_x=5, d_y=1, torch.float32)
    """
    if not isinstance(model, HookedModule):
        return model
    weights = proven_weights(model)
    return model if weights is None else _predictor(model, weights)


def _predictor(module: HookedModule, weights: Weights) -> Predictor:
    return WeightsPredictor(own=weights, task=module.task, law_stated=module.law_stated)


@torch.no_grad()
def proven_weights(module: HookedModule) -> Weights | None:
    """Weights of the model of this package that predicts as the module does now; None if no reading of its state dict does.

    Heads have the module's numbers. They are proven again at each call, so that an edit of the module counts.
    """
    from mechinterp.checkpoints.module_state import state_of  # imports TransformerLens

    if module.hooked.is_hooked:
        return None
    with suppress(ValueError):
        recordings = _recordings(module)
        checkpoint = read_proven(state_of(module), recordings, _hints(module))
        if checkpoint.config.model.n_layers == module.hooked.n_layers:
            weights = checkpoint.weights.to(module.model.cfg.device)
            return _renumbered(module, weights, recordings[0])
    return None


def _recordings(module: HookedModule) -> list[Recording]:
    """Predictions of the module for prompts of its own length and, if it runs on them, of half of it."""
    task, dtype = module.task, module.model.cfg.dtype
    drawn = draw_prompts(task, N_PROMPTS, seed=2, dtype=torch.float64).to(dtype)
    batches = (
        [drawn, drawn.prefix(task.context_length // 2)] if task.context_length > 3 else [drawn]
    )
    recordings: list[Recording] = []
    for prompts in batches:
        try:
            arrays = (prompts.x, prompts.y, prompts.x_query, module.predict(prompts))
        except (ValueError, RuntimeError, IndexError, AssertionError):
            if not recordings:
                raise
            break  # a module that takes prompts of one length only
        recordings.append(recording_of(*arrays, half=dtype in HALF))
    return recordings


def _hints(module: HookedModule) -> Hints:
    """Settings that the module and its hooks show: sizes, heads, the score and its scale, and how often layers run."""
    task, heads = module.task, [block.get_submodule("attn") for block in module.model.blocks]
    stated = {name: value for name, value in asdict(task).items() if name in task.given}
    runs = len(module.hooked.blocks) // len(set(module.hooked.blocks))
    given: dict = {"model": {"passes": runs}} if runs > 1 else {}
    if all(hasattr(each, "hook_attn_scores") for each in heads):
        given["score"] = "softmax"
        if not any(each.turned for each in heads):
            given["scale"] = heads[0].factor
    sizes: dict = {"d_x": task.d_x, "d_y": task.d_y}
    return Hints(n_heads=module.hooked.n_heads, task=stated | sizes, **sizes, **given)


def _renumbered(module: HookedModule, weights: Weights, recording: Recording) -> Weights | None:
    """The weights with the module's numbers of heads; None if masked heads predict otherwise."""
    from scipy.optimize import linear_sum_assignment  # slow import

    prompts, limit = recording.prompts.to(weights.dtype), recording.tolerance
    spread = recording.spread[0]
    n_layers, n_heads = module.hooked.n_layers, module.hooked.n_heads
    masks = [[(layer, head)] for layer in range(n_layers) for head in range(n_heads)]
    one, other = (
        predictor.run(prompts, masks).double().unflatten(0, (n_layers, n_heads)) / spread
        for predictor in (module.predictor, _predictor(module, weights))
    )
    orders = []
    for mine, theirs in zip(one, other, strict=True):
        off = (mine[:, None] - theirs[None]).abs().flatten(2).amax(2).numpy(force=True)
        rows, order = linear_sum_assignment(off)
        order = np.arange(n_heads) if off.diagonal().max() <= limit else order
        if not off[rows, order].max() <= limit:
            return None
        orders.append(torch.from_numpy(order))
    return weights.with_tensors(_in_order(weights, orders))


def _in_order(weights: Weights, orders: Iterable[Tensor]) -> dict[str, Tensor]:
    """Tensors of heads, with the heads of each layer in this order."""
    names = {f"attn.{name}" for name in HEADS} & weights.tensors.keys()
    return {
        name: torch.stack(
            [t[o.to(t.device)] for t, o in zip(weights.tensors[name], orders, strict=True)]
        )
        for name in names
    }
