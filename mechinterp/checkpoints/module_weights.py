"""The weights of a hooked module by name, proven by the module's own predictions.

The module's state dict is read like a file. Names and shapes leave choices open, such as norms before or after a layer. A
reading is taken only if it gives the module's predictions, whole and with each head masked.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.checkpoints.foreign.candidates import (
    ROTARY_BASE,
    Case,
    Choices,
    Source,
    case_of,
    choices_of,
    near_values,
)
from mechinterp.checkpoints.foreign.formats import BARE, LAYERED, OWN_LAYERS, recognised
from mechinterp.checkpoints.foreign.options import ORIENTATIONS, Hints
from mechinterp.checkpoints.foreign.tensors import Parts, parts_of
from mechinterp.checkpoints.module_function import HALF, HALF_LIMIT, deviation
from mechinterp.checkpoints.module_state import state_of
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.run.predictor import Predictor, WeightsPredictor, predictor_of
from mechinterp.models.run.predictor import Source as Model
from mechinterp.models.weights import HEADS, Weights

PROVEN = 1e-3
"""Largest difference between a proven reading and the module, in standard deviations of the prediction."""
N_PROMPTS, N_FIRST = 32, 4
"""Number of prompts of the proof, and of the first comparison of all readings."""
MOST_READINGS = 1024
"""Largest number of combinations of choices that are tried."""
N_BEST, ROUNDS = 6, 3
"""Number of readings that are refined, and how often."""
Batch = list[tuple[Prompts, Float[Tensor, "batch d_y"]]]
"""Prompts of one length or more, and what the module predicts for them."""


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
    if module.hooked.is_hooked:
        return None
    batch = _batch(module)
    limit = HALF_LIMIT if module.model.cfg.dtype in HALF else PROVEN
    # A constant is predicted by too many readings.
    if batch[0][1].std(0).min() == 0:
        return None
    for case in _nearest(list(_cases(module)), _few(batch), limit):
        if _deviation(case, batch) <= limit:
            return _renumbered(module, case.weights(), batch, limit)
    return None


def _batch(module: HookedModule) -> Batch:
    """Prompts of the module's own length and, if it runs on them, of half of it."""
    task = module.task
    prompts = draw_prompts(task, N_PROMPTS, seed=2, dtype=torch.float64).to(module.model.cfg.dtype)
    batch = [(prompts, module.predict(prompts))]
    shorter = prompts.prefix(task.context_length // 2) if task.context_length > 3 else None
    with suppress(ValueError, RuntimeError, IndexError, AssertionError):
        batch += [] if shorter is None else [(shorter, module.predict(shorter))]
    return batch


def _few(batch: Batch) -> Batch:
    return [(prompts[:N_FIRST], predicted[:N_FIRST]) for prompts, predicted in batch]


def _predicted(case: Case, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    weights = case.weights()
    # Sums of one layer in closed form lose digits in single precision.
    weights = weights.to(torch.float64) if weights.model.one_attention else weights
    return predictor_of(weights).predict(prompts.to(weights.dtype).to(weights.device))


def _deviation(case: Case, batch: Batch) -> float:
    """Largest difference between a reading and the module; infinite if the reading does not run."""
    off = [float("inf")]
    with suppress(ValueError):
        off = [deviation(known, _predicted(case, prompts)) for prompts, known in batch]
    return max(off)


def _nearest(cases: list[Case], batch: Batch, limit: float) -> list[Case]:
    """Readings that agree on a few prompts; if none does, refinements of the nearest are tried."""
    seen: set[tuple] = set()
    for _ in range(ROUNDS + 1):
        cases = [each for each in cases if _key(each) not in seen]
        seen |= {_key(each) for each in cases}
        scored = [(_deviation(each, batch), number) for number, each in enumerate(cases)]
        if near := [cases[number] for off, number in scored if off <= limit]:
            return near
        best = [cases[number] for off, number in sorted(scored)[:N_BEST] if off < np.inf]
        cases = [more for each in best for more in _refined(each)]
    return []


def _key(case: Case) -> tuple:
    return id(case.parts), tuple(sorted((n, repr(v)) for n, v in case.tried.items()))


def _refined(case: Case) -> list[Case]:
    near = near_values(case.tried, case.parts, case.source.closed)
    changes = ({name: value} for name, values in near.items() for value in values)
    return [*case.refined(), *case.changed(changes)]


def _cases(module: HookedModule) -> Iterator[Case]:
    """Readings of the module's state dict, with all combinations of choices that the module leaves open."""
    task, tensors = module.task, state_of(module)
    given = {name: value for name, value in asdict(task).items() if name in task.given}
    sizes = {"d_x": task.d_x, "d_y": task.d_y}
    hints = Hints(n_heads=module.hooked.n_heads, task=given | sizes, **sizes)
    with suppress(ValueError):
        form, layout, known = recognised(tensors, hints)
        axes = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
        for each in (form.fixed["orientation"],) if "orientation" in form.fixed else axes:
            parts = parts_of(known, layout, str(each), hints, {}, form.wide_heads)
            if form is LAYERED and parts.alone:
                form = OWN_LAYERS if "out.weight" in parts.layers[0] else BARE
            choices = dict(choices_of(parts, form, {}, hints)) | _shown(module, parts)
            source = Source(form, choices, {}, hints, {})
            if np.prod([len(values) for values in choices.values()]) > MOST_READINGS:
                continue
            for values in product(*choices.values()):
                tried = {"orientation": each, **dict(zip(choices, values, strict=True))}
                with suppress(ValueError):
                    case = case_of(source, parts, tried)  # type: ignore[arg-type]
                    if case.model.n_layers == module.hooked.n_layers:
                        yield case


def _shown(module: HookedModule, parts: Parts) -> Choices:
    """Choices that the hooks of the module show: the score and its scale, and how often layers run."""
    heads = [block.attn for block in module.model.blocks]
    shown: dict[str, tuple] = {}
    if "read_in.weight" in parts.ends or not parts.alone:
        shown["passes"] = (max(1, module.hooked.n_layers // len(parts.layers)),)
    length, factor = module.task.context_length, heads[0].factor
    scales = dict.fromkeys((None, 1.0, parts.width**-0.5, 1 / parts.d_head))
    if all(each.mask for each in heads):
        shown["score"] = ("linear/L", "linear")
        scales |= dict.fromkeys((factor * length, factor * (length + 1), factor))
    elif all(hasattr(each, "hook_attn_scores") for each in heads):
        shown["score"] = ("softmax",)
        if all(each.turned for each in heads):
            shown |= {"positions": ("rotary",), "rotary_base": (ROTARY_BASE,)}
            shown["rotary_adjacent_pairs"] = (False, True)
        else:
            scales = dict.fromkeys((factor,))
    return shown | {"scale": tuple(scales)}


def _renumbered(
    module: HookedModule, weights: Weights, batch: Batch, limit: float
) -> Weights | None:
    """The weights with the module's numbers of heads; None if masked heads predict otherwise."""
    from scipy.optimize import linear_sum_assignment  # slow import

    prompts, known = batch[0]
    spread = known.double().std(0)
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
