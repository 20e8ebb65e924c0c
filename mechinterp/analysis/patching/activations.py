"""Activation patching by layer and position.

TransformerLens reads the number of positions off the last axis of its input, which is d_model for prompts of vectors. Here
the positions are those of the activations.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.ablation.measured import Metric
from mechinterp.analysis.patching.pairing import clean_and_corrupted, inputs_of, output_metric, put
from mechinterp.analysis.result import HEAD_COLUMNS, METRIC_UNIT
from mechinterp.analysis.stats import estimates, mean_and_sem
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.run.predictor import Source, predictor_of

LAYER_ACTIVATIONS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""Activations of a whole layer."""
OF_MLPS = ("resid_mid", "mlp_out")
"""Activations that only a layer with an MLP has."""
HEAD_PARTS = ("q", "k", "v", "z", "pattern")
"""Activations of a single head."""
N_PATCH_PAIRS = 64
"""Default number of pairs of prompts; every layer, position and head needs one run on them."""


@dataclass(frozen=True, eq=False, repr=False)
class PatchedActivations(Result):
    """Change of a metric when the activation at one position is replaced by that of other prompts."""

    COLUMNS: ClassVar = HEAD_COLUMNS | {
        "activation": "Name of the patched activation: the residual stream, an output added to it, or a part of each head.",
        "effect": "Patched minus unpatched metric, mean over prompts; streams have no head axis.",
        "effect_sem": "Standard error of effect over prompts.",
        "pos": "Position of the activation, from 0; the last is the query's.",
    }
    UNITS: ClassVar = {METRIC_UNIT: ("effect",)}
    activation: str
    effect: Float[np.ndarray, "layer pos *head"]
    effect_sem: Float[np.ndarray, "layer pos *head"]
    total: float
    """Metric on the clean prompts minus metric on the corrupted prompts: the effect of a complete patch."""
    total_sem: float
    unit: str = "y²"
    """Unit of the metric; empty for a metric of the user's."""

    def __repr__(self) -> str:
        layer, pos, *head = np.unravel_index(int(np.abs(self.effect).argmax()), self.effect.shape)
        place = f"L{layer}" + "".join(f"H{h}" for h in head)
        largest = self.effect[layer, pos, *head]
        return f"PatchedActivations({self.activation}: {place} position {pos} {largest:+.3g} of {self.total:+.3g})"

    def to_frame(self) -> pd.DataFrame:
        """One row per layer, position and, for parts of heads, head."""
        axes = dict(zip(("layer", "pos", "head"), map(range, self.effect.shape), strict=False))
        frame = frame_of(self, *with_sem("effect"), **axes)
        frame.insert(0, "activation", self.activation)
        return frame

    def plot(self) -> go.Figure:
        """Effect over positions, one curve per layer or head."""
        per_layer = [f"L{layer}" for layer in range(len(self.effect))]
        heads = range(self.effect.shape[2]) if self.effect.ndim == 3 else ()
        names = [f"{layer}H{head}" for layer in per_layer for head in heads] or per_layer
        curves = [
            np.moveaxis(values, 1, -1).reshape(len(names), -1)
            for values in (self.effect, self.effect_sem)
        ]
        return figures.lines(
            np.arange(self.effect.shape[1]),
            figures.named(names, *curves),
            title=f"Change of the metric when {self.activation} at one position is patched",
            x_title="position (the last is the query)",
            y_title=f"change of the metric{f' ({self.unit})' if self.unit else ''}",
            zero_line=True,
        )


def patch_activations(
    source: Source,
    clean: Prompts | None = None,
    corrupted: Prompts | None = None,
    *,
    activation: str = "resid_pre",
    metric: Metric | None = None,
    task: TaskLike | None = None,
    n_prompts: int = N_PATCH_PAIRS,
    seed: int = 0,
) -> PatchedActivations:
    """Change of a metric on corrupted prompts when the activation at one position is that of the clean prompts.

    Args:
        clean: Prompts that provide the activation; None draws `n_prompts` of the model's own task
            with `seed`.
        corrupted: Prompts that the model runs on; None means the clean ones with other task
            vectors, drawn with `seed` + 1.
        activation: "resid_pre", "attn_out", "resid_mid", "mlp_out" or "resid_post"; or a head's "q", "k", "v", "z" or
            "pattern". For a pattern the row of the query at this position is patched.
        metric: Function from predictions [batch, d_y] and the clean prompts to one number per
            prompt; None means minus the squared distance between the prediction and that on the
            clean prompts, unit y^2.
        task: Law of drawn prompts; None means the model's own.
    Raises:
        ValueError: If the activation is unknown or the model has no hook or MLP for it, the prompts differ
            in shape, the metric does not give one number per prompt, or the model is in training mode.
    Source:
        Meng et al. 2022, arXiv 2202.05262 (causal tracing).
    See also:
        `attribute_edges`, `probe`.
    Example:
        >>> from mechinterp import load
        >>> patch_activations(load("softmax-h2-s0"), activation="v", n_prompts=8).effect.shape
        (1, 41, 2)
    """
    if activation not in LAYER_ACTIVATIONS + HEAD_PARTS:
        known = ", ".join(LAYER_ACTIVATIONS + HEAD_PARTS)
        raise ValueError(f"activation must be one of {known}, got {activation!r}.")
    clean, corrupted = clean_and_corrupted(
        source,
        clean,
        corrupted,
        analysis="patch_activations",
        name="clean",
        task=task,
        n_prompts=n_prompts,
        seed=seed,
    )
    hooked = predictor_of(source).hooked
    _require(hooked, activation)
    return _patched(hooked, clean, corrupted, activation, metric)


def _patched(
    hooked: HookedPredictor,
    clean: Prompts,
    corrupted: Prompts,
    activation: str,
    metric: Metric | None,
) -> PatchedActivations:
    """The activation patched at one place after the other."""
    from transformer_lens.utilities import get_act_name  # slow import

    _, other = inputs_of(hooked.inputs, clean, corrupted)
    names = [get_act_name(activation, layer) for layer in range(hooked.n_layers)]
    with torch.no_grad():
        output, cached = hooked.activations(clean, names)
        of_output = output_metric(hooked.read, metric, clean, output)
        before = of_output(hooked.model(other))
        shape = (len(clean), hooked.n_layers, _positions(activation, cached))
        effect = np.empty((*shape, hooked.n_heads) if activation in HEAD_PARTS else shape)
        for layer, pos, *head in np.ndindex(effect.shape[1:]):
            at = (*head, pos) if activation == "pattern" else (pos, *head)
            hook = names[layer], partial(put, at=at, values=cached[layer])
            after = of_output(hooked.run(other, [hook]))
            effect[:, layer, pos, *head] = (after - before).double().numpy(force=True)
    total = (of_output(output) - before).double().numpy(force=True)
    measured = estimates(effect=mean_and_sem(effect), total=mean_and_sem(total))
    return PatchedActivations(activation, **measured, unit="y²" if metric is None else "")


def _require(hooked: HookedPredictor, activation: str) -> None:
    """Refuse an activation that the model lacks, and a model in training mode."""
    if activation in OF_MLPS and not getattr(hooked.model.cfg, "d_mlp", None):
        raise ValueError(f"{activation} needs a model with MLPs, got one of attention alone.")
    if hooked.model.training:
        raise ValueError(
            "model must be in evaluation mode (call .eval()), got a model in training mode."
        )


def _positions(activation: str, cached: list[Tensor]) -> int:
    """Number of positions of the activation, which may differ from the number of positions of the input."""
    lengths = {values.shape[2 if activation == "pattern" else 1] for values in cached}
    if len(lengths) > 1:
        listed = ", ".join(map(str, sorted(lengths)))
        raise ValueError(
            f"{activation} must have the same number of positions in every layer, got {listed}."
        )
    return lengths.pop()
