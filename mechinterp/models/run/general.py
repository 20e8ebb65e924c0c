"""Predictions, masks and streams of any model of this package, computed from its weights without hooks.

Everything before a masked head is reused: the head's output is subtracted from the stream, and only later layers run
again, the last one at the query only. TransformerLens is not loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.config import ModelConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import CHUNK, UNLIMITED, chunks, layers_bytes, together
from mechinterp.models.hooked.masks import Head, Values, by_layers, mask_z, mean_z, swapped
from mechinterp.models.layers import AVERAGE, SCORE_PRODUCTS, attention_pattern
from mechinterp.models.run.attend import (
    Attend,
    Keys,
    Queries,
    attend,
    can_fuse,
    fused_softmax,
    pattern_of,
)
from mechinterp.models.run.layer import ALL, LAST, Layer, X, embedded, read_in, read_out
from mechinterp.models.run.linear_pass import linear_pass
from mechinterp.models.weights import Weights
from mechinterp.progress import progress

_WRITTEN = "layer batch head d, layer head d d_model -> layer batch head d_model"


def predictions_at_every(
    weights: Weights, prompts: Prompts, *, attend: Attend = attend
) -> Float[Tensor, "batch n_pairs d_y"]:
    """Predictions of y at every x, from the 0 to L pairs before it, differentiable in the weights.

    For models of tokens in turn, and one recurrent layer on pairs (`ModelConfig.predicts_everywhere`). Entry k equals the prediction for a prompt that ends with this x after its first k pairs, if the model is causal.

    Example:
        >>> from mechinterp import load, sample_prompts
        >>> checkpoint = load("checkpoints/pool-gpt2-m16")
        >>> prompts = sample_prompts(checkpoint, 4)
        >>> tuple(predictions_at_every(checkpoint.weights, prompts).shape)
        (4, 9, 1)
    """
    if weights.model.layout == "pairs":
        return _asked_beside(weights, prompts)
    passed = _streams(weights, embedded(weights, prompts), attend=attend, last=X)
    return read_out(weights, _after(weights.n_layers, passed))


def _asked_beside(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch n_pairs d_y"]:
    """Predictions of one recurrent layer at every x, each of which reads the state after the pairs before it."""
    layer = Layer(weights, 0, attend, ALL)
    queries = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    asking = read_in(weights, pad(queries, (0, weights.d_y)))
    z = layer.z_beside(asking, read_in(weights, prompts.context_tokens))
    return read_out(weights, layer.after(asking, layer.written(z)))


def predictions(
    weights: Weights, prompts: Prompts, *, attend: Attend = attend
) -> Float[Tensor, "batch d_y"]:
    """Predictions, in units of y, differentiable in the weights.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> prompts = draw_prompts(TaskConfig(), 8, seed=0, dtype=torch.float64)
        >>> predictions(zero_head(d_x=5), prompts).any()
        tensor(False)
    """
    passed = _streams(weights, embedded(weights, prompts), attend=attend)
    return read_out(weights, _after(weights.n_layers, passed))[:, -1]


def predict_at_every(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch n_pairs d_y"]:
    """`predictions_at_every` in chunks of prompts."""
    parts = (predictions_at_every(weights, prompts[rows]) for rows in _chunks(weights, prompts))
    return torch.cat(list(parts))


def predictions_in_chunks(
    weights: Weights, prompts: Prompts, *, attend: Attend = attend
) -> Float[Tensor, "batch d_y"]:
    """`predictions` in chunks of prompts, which fit into a processor's cache."""
    chunks = _chunks(weights, prompts)
    return torch.cat([predictions(weights, prompts[rows], attend=attend) for rows in chunks])


def predict_from(
    weights: Weights, prompts: Prompts, layer: int, at_query: Float[Tensor, "batch d_model"]
) -> Float[Tensor, "batch d_y"]:
    """Predictions, with the stream at the query after `layer` layers set to the given one."""
    parts = []
    for rows in _chunks(weights, prompts):
        stream = _after(layer, _streams(weights, embedded(weights, prompts[rows]))).clone()
        stream[:, -1] = at_query[rows]
        for number in range(layer, weights.n_layers):
            own = Layer(weights, number, attend, LAST)
            stream = own.after(stream, own.written(own.z(stream)))
        parts.append(read_out(weights, stream)[:, -1])
    return torch.cat(parts)


def predict_deep(
    weights: Weights, prompts: Prompts, *, attend: Attend = attend
) -> Float[Tensor, "batch d_y"]:
    """Predictions, differentiable in the weights; linear attention takes a shortcut through the context's second moment.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> from mechinterp.models.constructions.stack import stack_of_layers
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> weights = stack_of_layers(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0)
        >>> predict_deep(weights, draw_prompts(TaskConfig(), 8)).any()
        tensor(False)
    """
    if weights.model.stack == "linear":
        return linear_pass(weights, prompts).prediction()
    return predictions(weights, prompts, attend=attend)


def masked_predictions(
    weights: Weights, prompts: Prompts, masks: Sequence[Sequence[Head]], *, method: str = "zero"
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask."""
    by_layer, parts = [by_layers(heads) for heads in masks], []
    layers = [Layer(weights, layer, attend, LAST) for layer in range(weights.n_layers)]
    chunks = _chunks(weights, prompts)
    means = None
    if method == "mean":
        runs = (_run(layers, embedded(weights, prompts[rows])) for rows in chunks)
        means = mean_z((run.z for run in runs), len(prompts))
    for rows in progress(chunks, f"masking heads ({method})"):
        run = _run(layers, embedded(weights, prompts[rows]))
        values = [swapped(z) for z in run.z] if method == "resample" else means
        streams = [run.masked(heads, values) for heads in by_layer]
        parts.append(torch.stack([read_out(weights, stream)[:, -1] for stream in streams]))
    return torch.cat(parts, dim=1)


def streams(
    weights: Weights, prompts: Prompts, *, heads: Sequence[Head] = ()
) -> Float[Tensor, "layer batch 1 d_model"]:
    """Stream at the query before each layer and after the last, with heads masked."""
    parts = []
    for rows in _chunks(weights, prompts):
        passed = _streams(weights, embedded(weights, prompts[rows]), masked=by_layers(heads))
        parts.append(torch.stack([stream[:, -1:] for stream in passed]))
    return torch.cat(parts, dim=1)


def query_streams(
    weights: Weights, prompts: Prompts, layer: int
) -> Float[Tensor, "batch pos d_model"]:
    """Stream after `layer` layers at the query, with each covariate in turn as the query; the prompt's own query is last.

    For models without positions in which tokens read the context alone: one pass has all covariates as queries.
    """
    n, parts = prompts.x.shape[1], []

    def to_context(q: Queries, k: Keys, v: Keys, model: ModelConfig, rows: slice) -> Queries:
        if can_fuse(model, n):
            return fused_softmax(q, k[:, :n], v[:, :n])
        scores = einsum(q, k[:, :n], SCORE_PRODUCTS)
        pattern = attention_pattern(scores, score=model.score, slope=model.score_slope)
        return einsum(pattern, v[:, :n], AVERAGE)

    for rows in _chunks(weights, prompts):
        chunk = prompts[rows]
        queries = pad(torch.cat([chunk.x, chunk.x_query[:, None]], dim=1), (0, weights.d_y))
        stream = read_in(weights, torch.cat([chunk.context_tokens, queries], dim=1))
        passed = _streams(weights, stream, attend=to_context, last=ALL)
        parts.append(_after(layer, passed)[:, n:])
    return torch.cat(parts)


def query_patterns(weights: Weights, prompts: Prompts) -> Float[Tensor, "layer batch head key"]:
    """Attention weights of the query in every layer."""
    parts = []
    for rows in _chunks(weights, prompts):
        patterns: list[Tensor] = []

        def noting(
            q: Queries, k: Keys, v: Keys, model: ModelConfig, rows: slice, to: list = patterns
        ) -> Queries:
            to.append(pattern_of(q, k, model, rows)[:, :, -1])
            return attend(q, k, v, model, rows)

        predictions(weights, prompts[rows], attend=noting)
        parts.append(torch.stack(patterns))
    return torch.cat(parts, dim=1)


def query_writes(weights: Weights, prompts: Prompts) -> Float[Tensor, "layer batch head d_model"]:
    """Output of each head at the query."""
    layers = [Layer(weights, layer, attend, LAST) for layer in range(weights.n_layers)]
    parts = []
    for rows in _chunks(weights, prompts):
        run = _run(layers, embedded(weights, prompts[rows]))
        at_query = torch.stack([z[:, -1] for z in run.z])
        parts.append(einsum(at_query, weights.W_O, _WRITTEN))
    return torch.cat(parts, dim=1)


def _streams(
    weights: Weights,
    stream: Float[Tensor, "batch pos d_model"],
    *,
    attend: Attend = attend,
    last: slice = LAST,
    masked: Mapping[int, list[int]] | None = None,
) -> Iterator[Float[Tensor, "batch _row d_model"]]:
    """Stream before each layer and after the last, with the z of masked heads replaced by zeros."""
    yield stream
    for number in range(weights.n_layers):
        layer = Layer(weights, number, attend, last)
        z = layer.z(stream)
        if masked and number in masked:
            z = mask_z(z, heads=masked[number], value=None)
        stream = layer.after(stream, layer.written(z))
        yield stream


def _after(n_layers: int, streams: Iterator[Tensor]) -> Tensor:
    """Stream after this number of layers."""
    return next(islice(streams, n_layers, None))


@dataclass(frozen=True, eq=False)
class _Run:
    """Forward pass over a chunk of prompts, stored so that a masked pass can start at any layer."""

    layers: list[Layer]
    streams: list[Tensor]
    """Stream before each layer."""
    z: list[Tensor]
    added: list[Tensor]
    """Sum of the heads' outputs of each layer."""

    def masked(
        self, by_layer: dict[int, list[int]], values: Values | None
    ) -> Float[Tensor, "batch row d_model"]:
        """Stream after the last layer with heads masked; bitwise the full pass if these heads write nothing."""
        end = len(self.layers) - 1
        first = min(by_layer, default=end)
        stream = self.streams[first]
        for layer in self.layers[first:]:
            number = layer.number
            if number == first != end:
                z = self.z[first]
                gone = z if values is None else z - values[first].to(z)
                taken = layer.written(gone, by_layer[first])
                stream = layer.after(stream, self.added[first] - taken)
                continue
            z = self.z[end] if first == end else layer.z(stream)
            if number in by_layer:
                value = None if values is None else values[number]
                z = mask_z(z, heads=by_layer[number], value=value)
            stream = layer.after(stream, layer.written(z))
        return stream


def pass_bytes(weights: Weights, length: int) -> int:
    """Memory that one prompt of this many pairs takes while it runs through the layers, in bytes."""
    model, sizes = weights.model, (weights.d_x, weights.d_y)
    n_tokens, width = model.n_tokens(length), weights.dtype.itemsize
    # A mesa layer solves one system per token.
    systems = n_tokens * weights.n_heads * weights.d_head**2 if model.score == "mesa" else 0
    return 2 * width * systems + layers_bytes(
        n_layers=weights.n_layers,
        n_heads=weights.n_heads,
        d_head=model.head_width(*sizes),
        d_model=model.stream_width(*sizes),
        d_mlp=model.d_mlp or 0,
        n_tokens=n_tokens,
        width=width,
    )


def _chunks(weights: Weights, prompts: Prompts) -> list[slice]:
    """Slices of the prompts that run together in memory."""
    length = prompts.x.shape[1]
    what = f"{weights.n_layers} layers on prompts of {length} pairs"
    most = CHUNK if weights.device.type == "cpu" else UNLIMITED
    return chunks(len(prompts), together(pass_bytes(weights, length), what, most=most))


def _run(layers: list[Layer], stream: Float[Tensor, "batch pos d_model"]) -> _Run:
    streams, every_z, added = [stream], [], []
    for layer in layers:
        every_z.append(layer.z(streams[-1]))
        added.append(layer.written(every_z[-1]))
        streams.append(layer.after(streams[-1], added[-1]))
    return _Run(layers, streams[:-1], every_z, added)
