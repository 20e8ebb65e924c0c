"""Predictions with heads masked: hooks, a context that says when they did nothing, and many masks at once.

What comes before a masked head does not depend on it, and in a model of attention alone what it adds to the
stream can be taken away again. So each mask costs the layers after it, and of the last one the query only. Linear
attention is not run token by token at all: see `LinearPass`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.estimates import require_moderate
from mechinterp.icl.prompts import Prompts
from mechinterp.models.adapter import HookedPredictor, as_predictor, require_sizes, z_name
from mechinterp.models.deep import LINEAR, DeepWeights, linear_pass
from mechinterp.models.functional import AttentionWeights, attend
from mechinterp.tracking import Track, untracked

if TYPE_CHECKING:
    from mechinterp.models.transformer import ICLTransformer

METHODS = ("zero", "mean", "resample")
CHUNK = 256  # small enough for a processor's cache, and even: prompts swap in pairs

Head = tuple[int, int]
"""(layer, head), counted from 0."""
Hooks = list[tuple[str | Callable, Callable]]
Values = Sequence[Tensor] | Tensor
"""For each layer what takes the place of z, [pos, head, d_head], or with a leading axis of prompts."""


def mask_heads(heads: Sequence[Head], *, values: Values | None = None) -> Hooks:
    """Forward hooks that mask heads at hook_z, for `model.run_with_hooks` or `model.hooks`.

    Args:
        heads: (layer, head) pairs, counted from 0.
        values: Replaces z of the masked heads, [layer, pos, head, d_head]; None: zeros.
    Raises:
        ValueError: If a number is negative; when the model runs, if a layer has no such head.
    Example:
        >>> [name for name, hook in mask_heads([(0, 1)])]
        ['blocks.0.attn.hook_z']
    """
    for layer, head in heads:
        if layer < 0 or head < 0:
            raise ValueError(f"heads must be counted from 0, got L{layer}H{head}.")
    return [
        (
            z_name(layer),
            partial(_mask, heads=masked, value=None if values is None else values[layer]),
        )
        for layer, masked in by_layers(heads).items()
    ]


@contextmanager
def masked(
    model: "HookedPredictor | ICLTransformer",
    heads: Sequence[Head],
    *,
    values: Values | None = None,
) -> Iterator[None]:
    """A context in which the model runs with these heads masked, and which says so if it did not.

    Args:
        values: As in `mask_heads`.
    Raises:
        ValueError: If there is no such head; when it runs, if a layer has another number of heads; at the end,
            if a layer with masked heads never ran.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> prompts = sample_prompts(checkpoint.config.task, 4, generator=generator_for(0, "eval", 0))
        >>> with masked(checkpoint.model, [(0, 0), (0, 1)]):
        ...     checkpoint.model.predict(prompts).any()
        tensor(False)
    """
    predictor = as_predictor(model)
    predictor.require_heads(list(heads))
    by_layer = by_layers(heads)
    fired: set[int] = set()

    def note(layer: int, z: Tensor, hook: object) -> None:
        predictor.require_z(layer, z)
        fired.add(layer)

    notes = [(z_name(layer), partial(note, layer)) for layer in by_layer]
    with predictor.model.hooks(fwd_hooks=[*notes, *mask_heads(heads, values=values)]):
        yield
    idle = [(layer, head) for layer, head in heads if layer not in fired]
    if idle:
        names = ", ".join(f"L{layer}H{head}" for layer, head in idle)
        raise ValueError(
            f"Masking {names} changed nothing: the hook {z_name(idle[0][0])} never fired."
        )


def masked_predictions(
    model: "HookedPredictor | ICLTransformer",
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    method: str = "zero",
    track: Track = untracked,
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each of several masks, the same as of one run with hooks for each.

    Args:
        masks: The heads that are masked together; an empty mask is the full model.
        method: "zero"; "mean": z of a masked head is its mean over the prompts at that position;
            "resample": it is that of another prompt, prompts 2i and 2i + 1 swap.
        track: Told of the progress.
    Raises:
        ValueError: If there is no such head, the method is unknown, prompts that swap are odd in number, or
            they do not fit the model.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> prompts = sample_prompts(checkpoint.config.task, 4, generator=generator_for(0, "eval", 0))
        >>> full, first, second = masked_predictions(checkpoint.model, prompts, [[], [(0, 1)], [(0, 0)]])
        >>> torch.allclose(first + second, full)
        True
    """
    predictor = as_predictor(model)
    predictor.require_heads([head for heads in masks for head in heads])
    _require_method(method, prompts)
    means = _mean_z(predictor, prompts) if method == "mean" else None
    linear = linear_weights(predictor, prompts) if method == "zero" else None
    by_layer, parts = [by_layers(heads) for heads in masks], []
    with torch.no_grad():
        for start in track(range(0, len(prompts), CHUNK), f"masking heads ({method})"):
            chunk = prompts[start : start + CHUNK]
            if linear is not None:
                short = linear_pass(linear, chunk)
                rows = [short.prediction(heads) for heads in by_layer]
            else:
                run = _run(predictor, chunk)
                values = [_swapped(z) for z in run.z] if method == "resample" else means
                rows = [run.masked(heads, values) for heads in by_layer]
            parts.append(torch.stack(rows))
    return torch.cat(parts, dim=1)


def masked_errors(
    model: "HookedPredictor | ICLTransformer",
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    method: str = "zero",
    track: Track = untracked,
) -> Float[np.ndarray, "unit mask"]:
    """Squared error against the clean target under each mask, mean over responses, of independent units.

    A unit is a prompt; where prompts swap in pairs it is the mean of a pair.
    """
    predictions = masked_predictions(model, prompts, masks, method=method, track=track)
    require_moderate(predictions)
    errors = (predictions - prompts.y_query_clean.to(predictions)).square().mean(2).T
    errors = errors.unflatten(0, (-1, 2)).mean(1) if method == "resample" else errors
    return errors.double().numpy(force=True)


def by_layers(heads: Sequence[Head]) -> dict[int, list[int]]:
    """The heads of each layer that has any, in order.

    Example:
        >>> by_layers([(1, 2), (0, 3), (1, 0)])
        {0: [3], 1: [0, 2]}
    """
    layers = sorted({layer for layer, _ in heads})
    return {at: sorted({head for layer, head in heads if layer == at}) for at in layers}


def linear_weights(predictor: HookedPredictor, prompts: Prompts) -> DeepWeights | None:
    """Of one of our models of linear attention, which need not be run token by token over these prompts.

    Raises:
        ValueError: If the prompts are of another d_x or d_y.
    """
    # Here and not above: it loads TransformerLens.
    from mechinterp.models.transformer import ICLTransformer

    model = predictor.model
    if not isinstance(model, ICLTransformer) or not predictor.adds_up or predictor.is_hooked:
        return None
    cfg = model.cfg
    if not cfg.context_only or cfg.biases or cfg.merged_qk or cfg.score not in LINEAR:
        return None
    require_sizes(prompts, d_x=cfg.d_x, d_y=cfg.d_y)
    return model.deep_weights


@dataclass(frozen=True, eq=False)
class _Run:
    """One pass over a chunk of prompts, at each layer of which a masked one can set in."""

    predictor: HookedPredictor
    prediction: Float[Tensor, "batch d_y"]
    resid: list[Tensor]
    """The stream before each layer."""
    z: list[Tensor]
    weights: list[AttentionWeights]
    """Of each layer, if what its heads add can be taken away again; else empty."""

    def masked(self, by_layer: dict[int, list[int]], values: Values | None) -> Tensor:
        """The prediction with heads masked."""
        predictor = self.predictor
        if self.weights:
            stream = self._stream_at_query(by_layer, values)
            return predictor.read(predictor.model(stream, start_at_layer=predictor.n_layers))
        if not by_layer:
            return self.prediction
        first = min(by_layer)
        with masked(predictor, _pairs(by_layer), values=values):
            return predictor.read(predictor.model(self.resid[first], start_at_layer=first))

    def _stream_at_query(
        self, by_layer: dict[int, list[int]], values: Values | None
    ) -> Float[Tensor, "batch 1 d_model"]:
        """The stream after all layers; the same bits as with no mask for a head that writes nothing."""
        end = self.predictor.n_layers - 1
        first = min(by_layer, default=end)
        stream = self.resid[end] if first == end else self._without(first, by_layer[first], values)
        if first + 1 < end:
            between = {layer: by_layer[layer] for layer in by_layer if first < layer < end}
            with masked(self.predictor, _pairs(between), values=values):
                stream = self.predictor.model(stream, start_at_layer=first + 1, stop_at_layer=end)
        last = self.weights[end]
        z = _z_at_query(last, stream)
        if end in by_layer:
            at_query = None if values is None else values[end][..., -1:, :, :]
            z = _mask(z[:, None], heads=by_layer[end], value=at_query)[:, 0]
        added = einsum(z, last.W_O, "batch head d_head, head d_head d_model -> batch d_model")
        added = added if last.b_O is None else added + last.b_O
        return stream[:, -1:] + added[:, None]

    def _without(
        self, layer: int, heads: list[int], values: Values | None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after a layer, what some heads have added to it taken away or replaced."""
        z = self.z[layer]
        gone = z if values is None else z - values[layer].to(z)
        taken = einsum(
            gone[:, :, heads],
            self.weights[layer].W_O[heads],
            "batch pos head d_head, head d_head d_model -> batch pos d_model",
        )
        return self.resid[layer + 1] - taken


def _run(predictor: HookedPredictor, prompts: Prompts) -> _Run:
    layers = range(predictor.n_layers)
    streams = [predictor.stream_name(layer) for layer in layers]
    heads = [z_name(layer) for layer in layers]
    shortcut = predictor.adds_up and not predictor.is_hooked
    output, found = predictor.activations(prompts, [*streams, *heads])
    return _Run(
        predictor=predictor,
        prediction=predictor.prediction(output, prompts),
        resid=found[: len(layers)],
        z=found[len(layers) :],
        weights=[predictor.layer_weights(layer) for layer in layers] if shortcut else [],
    )


def _z_at_query(
    last: AttentionWeights, stream: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch head d_head"]:
    keys = stream if last.attend_to_self else stream[:, :-1]
    pattern, _, averaged = attend(last, keys, stream[:, -1])
    z = einsum(averaged, last.W_V, "batch d_model head, head d_model d_head -> batch head d_head")
    return z if last.b_V is None else z + pattern.sum(1)[..., None] * last.b_V


def _mask(z: Tensor, hook: object = None, *, heads: list[int], value: Tensor | None) -> Tensor:
    if heads and max(heads) >= z.shape[2]:
        name, n_heads = getattr(hook, "name", "z"), z.shape[2]
        raise ValueError(f"heads of {name} must lie in 0 to {n_heads - 1}, got {max(heads)}.")
    z = z.clone()
    z[:, :, heads] = 0 if value is None else value[..., heads, :].to(z)
    return z


def _mean_z(predictor: HookedPredictor, prompts: Prompts) -> list[Tensor]:
    """For each layer the mean over prompts of z, [pos, head, d_head]."""
    names = [z_name(layer) for layer in range(predictor.n_layers)]
    totals: list[Tensor] = []
    with torch.no_grad():
        for start in range(0, len(prompts), CHUNK):
            _, found = predictor.activations(prompts[start : start + CHUNK], names)
            sums = [z.double().sum(0) for z in found]
            totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
    return [total / len(prompts) for total in totals]


def _swapped(z: Float[Tensor, " batch *axes"]) -> Float[Tensor, " batch *axes"]:
    """Prompts 2i and 2i + 1 in each other's place."""
    return z.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def _pairs(by_layer: dict[int, list[int]]) -> list[Head]:
    return [(layer, head) for layer, heads in by_layer.items() for head in heads]


def _require_method(method: str, prompts: Prompts) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if method == "resample" and len(prompts) % 2:
        raise ValueError(
            f"Prompts swap in pairs: there must be an even number, got {len(prompts)}."
        )
