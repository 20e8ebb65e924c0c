"""The weights of a hooked module by name, proven by the module's own predictions.

The module's state dict is read like a file, with the settings that the running module shows. A reading is taken only if it
gives the module's predictions, whole and with each head masked.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.options import Hints, stated_option
from mechinterp.checkpoints.foreign.read import read_proven
from mechinterp.checkpoints.foreign.readings.losses import Reading
from mechinterp.checkpoints.foreign.readings.recorded import HALVES, Recording, recording_of
from mechinterp.checkpoints.foreign.tensors.refusals import HOOK
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.predictor import Source as Model
from mechinterp.models.run.predictor import WeightsPredictor
from mechinterp.models.weights import HEADS, Weights

PROOF_PROMPTS = 32
"""Number of prompts of the proof at each length."""
MOST_READINGS = 96
"""Largest number of readings that are tried, each with a forward pass on a few prompts; a larger number only costs time."""


@dataclass(frozen=True, eq=False)
class ProvenPredictor(WeightsPredictor):
    """A hooked module by its proven weights."""

    readings: Sequence[Reading] = ()
    """Proven readings if there are several that differ on other prompts, that of the weights first."""

    def under(self, reading: Reading) -> "ProvenPredictor":
        """Predictor of the module by another of its readings."""
        return replace(self, own=reading.weights, readings=())


@dataclass(frozen=True, eq=False)
class ModuleProof:
    """Weights by name that give a module's predictions, or why there are none."""

    readings: tuple[Reading, ...] = ()
    """Proven readings, the most usual first; empty if there is none."""
    tried: str = ""
    """Number of readings that were tried, in words."""
    why: str = ""
    """Why there is no proven reading."""

    @property
    def weights(self) -> Weights | None:
        """Weights of the most usual reading; None if there is no proven reading."""
        return self.readings[0].weights if self.readings else None

    @property
    def open(self) -> list[str]:
        """Settings in which the proven readings differ, with their values, as options."""
        first, *others = self.readings or (None,)
        if first is None or not others:
            return []
        names = [n for n in first.tried if len({each.tried[n] for each in self.readings}) > 1]
        return [
            " or ".join(dict.fromkeys(stated_option(n, r.tried[n]) for r in self.readings))
            for n in names
        ]


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
    proof = proof_of(model)
    if proof.weights is None:
        return model
    readings = proof.readings if len(proof.readings) > 1 else ()
    return _predictor(model, proof.weights, readings)


def _predictor(
    module: HookedModule, weights: Weights, readings: Sequence[Reading] = ()
) -> ProvenPredictor:
    return ProvenPredictor(
        own=weights, task=module.task, law_stated=module.law_stated, readings=readings
    )


@torch.no_grad()
def proof_of(module: HookedModule) -> ModuleProof:
    """The readings of a module's state dict that predict as the module does now; their heads have the module's numbers.

    They are proven again at each call, so that an edit of the module counts.
    """
    if module.hooked.is_hooked:
        return ModuleProof(why="a hook changes what the module computes")
    if any(getattr(block.attn, "delta", None) is not None for block in module.model.blocks):
        why = "convolutions, gates and norms of its recurrent layers are not in the weights of this package"
        return ModuleProof(why=why)
    try:
        recordings = _recordings(module)
        readings, tried = _readings(module, recordings)
    except ValueError as error:
        why = " ".join(str(error).split()).removeprefix("state dict: ").removesuffix(".")
        return ModuleProof(why=why.removesuffix(f"; {HOOK}"))
    fits = (_renumbered(module, each.weights, recordings[0]) for each in readings)
    kept = [
        replace(each, build=lambda own=own: own)  # type: ignore[misc]
        for each, own in zip(readings, fits, strict=True)
        if own is not None
    ]
    if not kept:
        why = "a reading gives its predictions, but not with each head masked"
        return ModuleProof(tried=tried, why=why)
    return ModuleProof(tuple(kept), tried)


def _readings(
    module: HookedModule, recordings: Sequence[Recording]
) -> tuple[Sequence[Reading], str]:
    """Readings that give the recorded predictions, and the number of those tried, in words.

    Raises:
        ValueError: If there is none.
    """
    # They import TransformerLens.
    from mechinterp.checkpoints.modules.settings import shown_settings
    from mechinterp.checkpoints.modules.state import parts_of_module, state_of

    parts = parts_of_module(module)
    checkpoint = read_proven(
        state_of(module, parts),
        recordings,
        _hints(module),
        shown=shown_settings(module, parts, [each.prompts for each in recordings]),
        most=MOST_READINGS,
    )
    n_layers, device = module.hooked.n_layers, module.model.cfg.device
    if checkpoint.config.model.n_layers != n_layers:
        got = checkpoint.config.model.n_layers
        raise ValueError(f"a reading has {got} layers, and the module {n_layers}")
    alone = Reading({}, lambda: checkpoint.weights, 0.0, 0.0, predicts=True, ties=True, stands=True)
    readings = [
        replace(each, build=lambda each=each: each.weights.to(device))  # type: ignore[misc]
        for each in checkpoint.readings or (alone,)
    ]
    return readings, str(checkpoint.proven["predictions"]).partition(";")[0]


def _recordings(module: HookedModule) -> list[Recording]:
    """Predictions of the module for prompts of its own length and, if it runs on them, of half of it."""
    task, dtype = module.task, module.model.cfg.dtype
    drawn = draw_prompts(task, PROOF_PROMPTS, seed=2, dtype=torch.float64).to(dtype)
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
        recordings.append(recording_of(*arrays, half=dtype in HALVES))
    return recordings


def _hints(module: HookedModule) -> Hints:
    """Sizes of the module, and its task."""
    task = module.task
    stated = {name: value for name, value in asdict(task).items() if name in task.given}
    sizes: dict = {"d_x": task.d_x, "d_y": task.d_y}
    return Hints(n_heads=module.hooked.n_heads, task=stated | sizes, **sizes)


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
