"""Masks and streams of any hooked model, by its hooks.

What comes before a masked head does not depend on it, so that each mask costs the layers after it. In a model of
attention alone, what a head adds to the stream can be taken away again, and the last layer runs at the query only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import AttentionWeights, attend
from mechinterp.models.hooked.masks import (
    Head,
    Values,
    by_layers,
    mask_z,
    pattern_name,
    swapped,
    z_name,
)
from mechinterp.models.hooked.query_position import NoStreamError, query_positions
from mechinterp.models.hooked.runner import HookedPredictor, masked
from mechinterp.models.weights import Weights, heads_of
from mechinterp.progress import ProgressCallback, no_progress

CHUNK = 256  # small enough for a processor's cache, and even: prompts swap in pairs


def masked_predictions(
    hooked: HookedPredictor,
    weights: Weights | None,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    method: str,
    progress: ProgressCallback = no_progress,
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask, the same as of one run with hooks for each.

    Args:
        weights: Those of a model of attention alone, whose heads can be taken away again; None: any other model.
    """
    layers = _layers(weights) if weights is not None else []
    means = _mean_z(hooked, prompts) if method == "mean" else None
    by_layer, parts = [by_layers(heads) for heads in masks], []
    for rows in progress(hooked.chunks(prompts, CHUNK), f"masking heads ({method})"):
        run = _run(hooked, prompts[rows], layers)
        values = [swapped(z) for z in run.z] if method == "resample" else means
        parts.append(torch.stack([run.masked(heads, values) for heads in by_layer]))
    return torch.cat(parts, dim=1)


def streams(
    hooked: HookedPredictor,
    prompts: Prompts,
    *,
    heads: Sequence[Head],
    positions: Sequence[int],
) -> Float[Tensor, "layer batch pos d_model"]:
    """The stream before each layer and after the last, with heads masked; narrower ones are filled up with zeros."""
    names = [hooked.stream_name(layer) for layer in range(hooked.n_layers + 1)]
    columns = _columns(query_positions(hooked, prompts), positions)
    parts = []
    with masked(hooked, heads):
        for rows in hooked.chunks(prompts, CHUNK):
            _, every_stream = hooked.activations(prompts[rows], names)
            parts.append(
                _stacked([stream[:, at] for stream, at in zip(every_stream, columns, strict=True)])
            )
    return torch.cat(parts, dim=1)


def _columns(places: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
    """Of each stream the positions that are meant, those of the query by where it is."""
    if set(places) != {-1} and set(positions) != {-1}:
        raise ValueError(
            f"positions other than the query's, -1, need streams with the query last, got it at {max(places)}."
        )
    return [list(positions) if place == -1 else [place] * len(positions) for place in places]


def _stacked(
    streams: Sequence[Float[Tensor, "batch axis _width"]],
) -> Float[Tensor, "layer batch axis width"]:
    """Streams, or patterns, of all layers, zeros behind those that are narrower than the widest."""
    widest = max(stream.shape[-1] for stream in streams)
    return torch.stack([pad(stream, (0, widest - stream.shape[-1])) for stream in streams])


def stream(
    hooked: HookedPredictor, prompts: Prompts, layer: int, *, heads: Sequence[Head] = ()
) -> Float[Tensor, "batch pos d_model"]:
    """The stream at every position after some layers, with heads masked."""
    chunks = [prompts[rows] for rows in hooked.chunks(prompts, CHUNK)]
    with masked(hooked, heads):
        if layer < hooked.n_layers and hooked.restarts:
            model = hooked.model
            return torch.cat([model(hooked.inputs(chunk), stop_at_layer=layer) for chunk in chunks])
        # Past the last layer a Bridge does not stop: it would give its prediction.
        name = hooked.stream_name(layer)
        return torch.cat([hooked.activations(chunk, [name])[1][0] for chunk in chunks])


def query_patterns(
    hooked: HookedPredictor, prompts: Prompts
) -> Float[Tensor, "layer batch head key"]:
    """Attention weights of the query in every layer, zeros behind those of fewer keys than the most."""
    names = [pattern_name(layer) for layer in range(hooked.n_layers)]
    places, parts = _query_rows(hooked, prompts[:1], names), []
    for rows in hooked.chunks(prompts, CHUNK):
        _, patterns = hooked.activations(prompts[rows], names)
        parts.append(_stacked([each[:, :, at] for each, at in zip(patterns, places, strict=True)]))
    return torch.cat(parts, dim=1)


def _query_rows(hooked: HookedPredictor, prompts: Prompts, names: Sequence[str]) -> list[int]:
    """Row of the query in the patterns; where no stream is known, the last of as many rows as the input has positions."""
    _, patterns = hooked.activations(prompts, names)
    try:
        return query_positions(hooked, prompts)[:-1]
    except NoStreamError:
        if {each.shape[2] for each in patterns} != {hooked.inputs(prompts).shape[1]}:
            raise
        return [-1] * len(names)


def query_writes(
    hooked: HookedPredictor, prompts: Prompts
) -> Float[Tensor, "layer batch head d_model"] | None:
    """What each head adds to the stream at the query; None where W_O is not known by that name."""
    outputs = [getattr(getattr(block, "attn", None), "W_O", None) for block in hooked.model.blocks]  # type: ignore[union-attr]
    matrices = [W_O for W_O in outputs if isinstance(W_O, Tensor)]
    if len(matrices) < hooked.n_layers:
        return None
    names = [z_name(layer) for layer in range(hooked.n_layers)]
    places, parts = query_positions(hooked, prompts), []
    for rows in hooked.chunks(prompts, CHUNK):
        _, every_z = hooked.activations(prompts[rows], names)
        written = [
            einsum(z[:, at], W_O, "batch head d_head, head d_head d_model -> batch head d_model")
            for z, at, W_O in zip(every_z, places[:-1], matrices, strict=True)
        ]
        parts.append(torch.stack(written))
    return torch.cat(parts, dim=1)


def read_out(
    hooked: HookedPredictor, prompts: Prompts, stream: Float[Tensor, "batch d_model"]
) -> Float[Tensor, "batch d_y"]:
    """What comes after the last layer makes of a stream at the query; other positions hold those of other prompts."""
    name, place = hooked.stream_name(hooked.n_layers), query_positions(hooked, prompts)[-1]
    parts = []
    for rows in hooked.chunks(prompts, CHUNK):

        def put(values: Tensor, hook: object, own: Tensor = stream[rows]) -> Tensor:
            held = values.flip(0)
            held[:, place] = own[:, : values.shape[-1]].to(
                values
            )  # streams are filled up to one width
            return held

        inputs = hooked.inputs(prompts[rows])
        output = hooked.model.run_with_hooks(inputs, fwd_hooks=[(name, put)])
        parts.append(hooked.prediction(output, prompts[rows]))
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class _Run:
    """One pass over a chunk of prompts, at each layer of which a masked one can set in."""

    hooked: HookedPredictor
    prompts: Prompts
    prediction: Float[Tensor, "batch d_y"]
    resid: list[Tensor]
    """The stream before each layer."""
    z: list[Tensor]
    layers: list[AttentionWeights]
    """Of each layer, if what its heads add can be taken away again; else empty."""

    def masked(self, by_layer: dict[int, list[int]], values: Values | None) -> Tensor:
        """The prediction with heads masked."""
        hooked = self.hooked
        if self.layers:
            stream = self._stream_at_query(by_layer, values)
            return hooked.read(hooked.model(stream, start_at_layer=hooked.n_layers))
        if not by_layer:
            return self.prediction
        first = min(by_layer)
        with masked(hooked, _pairs(by_layer), values=values):
            if not hooked.restarts:
                return hooked.read(hooked.model(hooked.inputs(self.prompts)))
            return hooked.read(hooked.model(self.resid[first], start_at_layer=first))

    def _stream_at_query(
        self, by_layer: dict[int, list[int]], values: Values | None
    ) -> Float[Tensor, "batch 1 d_model"]:
        """The stream after all layers; the same bits as with no mask for a head that writes nothing."""
        end = self.hooked.n_layers - 1
        first = min(by_layer, default=end)
        stream = self.resid[end] if first == end else self._without(first, by_layer[first], values)
        if first + 1 < end:
            between = {layer: by_layer[layer] for layer in by_layer if first < layer < end}
            with masked(self.hooked, _pairs(between), values=values):
                stream = self.hooked.model(stream, start_at_layer=first + 1, stop_at_layer=end)
        last = self.layers[end]
        z = _z_at_query(last, stream)
        if end in by_layer:
            at_query = None if values is None else values[end][..., -1:, :, :]
            z = mask_z(z[:, None], heads=by_layer[end], value=at_query)[:, 0]
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
            self.layers[layer].W_O[heads],
            "batch pos head d_head, head d_head d_model -> batch pos d_model",
        )
        return self.resid[layer + 1] - taken


def _run(hooked: HookedPredictor, prompts: Prompts, layers: list[AttentionWeights]) -> _Run:
    numbers = range(hooked.n_layers)
    names = [hooked.stream_name(layer) for layer in numbers]
    output, activations = hooked.activations(prompts, [*names, *map(z_name, numbers)])
    return _Run(
        hooked=hooked,
        prompts=prompts,
        prediction=hooked.prediction(output, prompts),
        resid=activations[: len(numbers)],
        z=activations[len(numbers) :],
        layers=layers,
    )


def _layers(weights: Weights) -> list[AttentionWeights]:
    """Each layer of a model of attention alone, W_O in full width."""
    layers = range(weights.n_layers)
    return [heads_of(weights.model, weights.attention(layer), weights.scale) for layer in layers]


def _z_at_query(
    last: AttentionWeights, stream: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch head d_head"]:
    keys = stream if last.attend_to_self else stream[:, :-1]
    pattern, _, averaged = attend(last, keys, stream[:, -1])
    z = einsum(averaged, last.W_V, "batch d_model head, head d_model d_head -> batch head d_head")
    return z if last.b_V is None else z + pattern.sum(1)[..., None] * last.b_V


def _mean_z(hooked: HookedPredictor, prompts: Prompts) -> list[Tensor]:
    """For each layer the mean over prompts of z, [pos, head, d_head]."""
    names = [z_name(layer) for layer in range(hooked.n_layers)]
    totals: list[Tensor] = []
    for rows in hooked.chunks(prompts, CHUNK):
        _, every_z = hooked.activations(prompts[rows], names)
        sums = [z.double().sum(0) for z in every_z]
        totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
    return [total / len(prompts) for total in totals]


def _pairs(by_layer: dict[int, list[int]]) -> list[Head]:
    return [(layer, head) for layer, heads in by_layer.items() for head in heads]
