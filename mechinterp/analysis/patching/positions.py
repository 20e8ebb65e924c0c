"""Activation patching by layer and position.

TransformerLens takes the number of positions from the last axis of its input, which for prompts of
vectors is d_model; here the positions are counted as they are.
"""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.patching.pairing import Metric, clean_and_corrupted, nearness
from mechinterp.analysis.stats import estimates, mean_and_sem
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.run.predictor import Source, predictor_of

STREAMS = ("resid_pre", "attn_out", "resid_post")
HEAD_PARTS = ("q", "k", "v", "z", "pattern")


@dataclass(frozen=True, eq=False, repr=False)
class PositionPatching(Result):
    """What a metric gains when one position's activation is taken from other prompts."""

    activation: str
    """What is patched: the residual stream or a sum written to it, or a part of each head."""
    effect: Float[np.ndarray, "layer pos *head"]
    """Mean over prompts of the patched minus the unpatched metric; no head axis for a stream."""
    effect_sem: Float[np.ndarray, "layer pos *head"]
    """Standard error of `effect` over prompts."""
    total: float
    """Metric of the clean minus that of the corrupted prompts: what a complete patch reaches."""
    total_sem: float

    def __repr__(self) -> str:
        layer, pos, *head = np.unravel_index(int(np.abs(self.effect).argmax()), self.effect.shape)
        place = f"L{layer}" + "".join(f"H{h}" for h in head)
        largest = self.effect[layer, pos, *head]
        return f"PositionPatching({self.activation}: {place} position {pos} {largest:+.3g} of {self.total:+.3g})"

    def to_frame(self) -> pd.DataFrame:
        """One row per layer, position and, for parts of heads, head."""
        axes = ("layer", "pos", "head")[: self.effect.ndim]
        places = dict(zip(axes, (i.ravel() for i in np.indices(self.effect.shape)), strict=True))
        values = {"effect": self.effect.ravel(), "effect_sem": self.effect_sem.ravel()}
        return pd.DataFrame({"activation": self.activation, **places, **values})

    def plot(self) -> go.Figure:
        """Effect over positions, a curve per layer or head."""
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
            y_title="change of the metric",
            zero_line=True,
        )


def first_prediction(logits: Float[Tensor, "batch pos d_y"]) -> Float[Tensor, " batch"]:
    """A metric: prediction of the query's first response, in units of y."""
    return logits[:, -1, 0]


def patch_positions(
    source: Source,
    clean: Prompts | None = None,
    corrupted: Prompts | None = None,
    *,
    activation: str = "resid_pre",
    metric: Metric | None = None,
    n_prompts: int = 64,
    seed: int = 0,
) -> PositionPatching:
    """Change of a metric on corrupted prompts when one position's activation is that of the clean ones.

    Args:
        clean: Prompts that the activation is taken from; None: `n_prompts` of the model's own task, by `seed`.
        corrupted: Prompts that the model runs on; None: the clean ones with other task vectors, by the seed after that.
        activation: "resid_pre", "attn_out" or "resid_post"; or a head's "q", "k", "v", "z" or "pattern",
            of which one row, that of the query at this position, is patched.
        metric: From the model's output [batch, pos, d_y] to one number per prompt, [batch]; None: minus the squared
            distance of the prediction from that of the clean prompts, unit y^2.
    Raises:
        ValueError: If the activation is unknown or the model has no hook for it, the prompts differ in shape, or the model
            is in training mode.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> clean, corrupted = (
        ...     sample_prompts(checkpoint.config.task, 4, generator=generator_for(0, "eval", step), context_length=6)
        ...     for step in (0, 1)
        ... )
        >>> patch_positions(checkpoint.model, clean, corrupted, activation="v").effect.shape
        (1, 7, 2)
    """
    if activation not in STREAMS + HEAD_PARTS:
        known = ", ".join(STREAMS + HEAD_PARTS)
        raise ValueError(f"activation must be one of {known}, got {activation!r}.")
    clean, corrupted = clean_and_corrupted(source, clean, corrupted, n_prompts=n_prompts, seed=seed)
    hooked = predictor_of(source).hooked
    tokens, other = hooked.inputs(clean), hooked.inputs(corrupted)
    shapes = [list(inputs.shape) for inputs in (tokens, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"clean and corrupted tokens must have one shape, got {shapes[0]} and {shapes[1]}."
        )
    n_pos = _positions(hooked, clean, activation)
    axes = {"layer": hooked.n_layers, "pos": n_pos, "head": hooked.n_heads}
    if activation == "pattern":
        axes = {name: axes[name] for name in ("layer", "head", "pos")}
    elif activation not in HEAD_PARTS:
        del axes["head"]
    if metric is None:
        with torch.no_grad():
            metric = nearness(hooked, hooked.prediction(hooked.model(tokens), clean))
    effects, gained = _patched(hooked, tokens, other, activation, metric, axes)
    return _summary(activation, effects, gained, axes)


def _positions(hooked: HookedPredictor, prompts: Prompts, activation: str) -> int:
    """How many positions the activation has, which may be others than the input's."""
    from transformer_lens.utilities import get_act_name

    names = [get_act_name(activation, layer) for layer in range(hooked.n_layers)]
    with torch.no_grad():
        _, found = hooked.activations(prompts[:1], names)
    lengths = {values.shape[2 if activation == "pattern" else 1] for values in found}
    if len(lengths) > 1:
        listed = ", ".join(map(str, sorted(lengths)))
        raise ValueError(f"{activation} must have as many positions in every layer, got {listed}.")
    return lengths.pop()


def _patched(
    hooked: HookedPredictor,
    clean: Tensor,
    corrupted: Tensor,
    activation: str,
    metric: Metric,
    axes: dict[str, int],
) -> tuple[Float[Tensor, "patch batch"], Float[Tensor, " batch"]]:
    """The metric's change by each patch in the order of `axes`, and between the clean and corrupted tokens."""
    from transformer_lens import ActivationCache, patching

    setter = patching.layer_pos_patch_setter
    if activation == "pattern":
        setter = patching.layer_head_pos_pattern_patch_setter
    elif activation in HEAD_PARTS:
        setter = patching.layer_pos_head_vector_patch_setter
    # The indices are given: TransformerLens would count d_model positions.
    indices = patching.make_df_from_ranges(list(axes.values()), list(axes))
    # TransformerLens draws a progress bar; a library prints nothing.
    with torch.no_grad(), redirect_stderr(io.StringIO()):
        logits, cache = hooked.model.run_with_cache(clean)
        assert isinstance(cache, ActivationCache)
        # Typed for TransformerLens' own config, of which only fields that ours has are read.
        result = patching.generic_activation_patch(  # type: ignore[call-overload]
            hooked.model,
            corrupted,
            cache,
            metric,
            setter,
            activation,
            index_df=indices,
            reduce="none",
            baseline=True,
        )
        return result.effect(), metric(logits) - metric(hooked.model(corrupted))


def _summary(
    activation: str, effects: Tensor, gained: Tensor, axes: dict[str, int]
) -> PositionPatching:
    by_prompt = effects.T.double().numpy(force=True).reshape(-1, *axes.values())
    order: Sequence[int] = [1 + list(axes).index(a) for a in ("layer", "pos", "head") if a in axes]
    effect = mean_and_sem(by_prompt.transpose(0, *order))
    total = mean_and_sem(gained.double().numpy(force=True))
    return PositionPatching(activation, **estimates(effect=effect, total=total))
