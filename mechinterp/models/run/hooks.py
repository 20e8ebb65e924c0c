"""Masks and streams of any hooked model, computed with its hooks.

Everything before a masked head is reused, so that each mask costs only the later layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import CHUNK
from mechinterp.models.hooked.masks import Head, mean_z, mlp_name, swapped, z_name
from mechinterp.models.hooked.query_position import NoStreamError, query_positions
from mechinterp.models.hooked.runner import HookedPredictor, masked
from mechinterp.progress import progress


def predict(hooked: HookedPredictor, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Predictions, in chunks; for all prompts at once under hooks of the user, which may depend on the whole batch."""
    if hooked.is_hooked:
        return hooked.predict(prompts)
    with torch.no_grad():
        return torch.cat([hooked.predict(prompts[rows]) for rows in hooked.chunks(prompts, CHUNK)])


def masked_predictions(
    hooked: HookedPredictor,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    mlps: Sequence[Sequence[int]] | None,
    at: int | None,
    method: str,
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask, equal to a separate hooked run for each."""
    n = hooked.n_layers
    names = [name(layer) for name in (hooked.stream_name, z_name) for layer in range(n)]
    names += [] if mlps is None else [mlp_name(layer) for layer in range(n)]
    mlps_of = [()] * len(masks) if mlps is None else mlps
    chunks = hooked.chunks(prompts, CHUNK)
    means, parts = None, []
    if method == "mean":
        written = (hooked.activations(prompts[rows], names)[1] for rows in chunks)
        means = mean_z((each[n:] for each in written), len(prompts))
    for rows in progress(chunks, f"masking heads ({method})"):
        chunk = prompts[rows]
        full, activations = hooked.activations(chunk, names)
        resid, own = activations[:n], activations[n:]
        values = [swapped(each) for each in own] if method == "resample" else means
        z, out = (None, None) if values is None else (values[:n], values[n:])
        predictions = []
        for heads, gone in zip(masks, mlps_of, strict=True):
            with masked(hooked, heads, values=z, mlps=gone, mlp_values=out, at=at):
                if not heads and not gone:
                    output = full
                elif hooked.restarts:
                    first = min(*gone, *(layer for layer, _ in heads), n)
                    output = hooked.model(resid[first], start_at_layer=first)
                else:
                    output = hooked.model(hooked.inputs(chunk))
            predictions.append(hooked.prediction(output, chunk))
        parts.append(torch.stack(predictions))
    return torch.cat(parts, dim=1)


def streams(
    hooked: HookedPredictor, prompts: Prompts, *, heads: Sequence[Head], positions: Sequence[int]
) -> Float[Tensor, "layer batch pos d_model"]:
    """Stream before each layer and after the last, with heads masked. Narrower streams are padded with zeros.

    Raises:
        ValueError: If positions other than the query's, -1, are given and the query is not last in every stream.
    """
    names = [hooked.stream_name(layer) for layer in range(hooked.n_layers + 1)]
    places = query_positions(hooked, prompts)
    if set(places) != {-1} and set(positions) != {-1}:
        raise ValueError(
            f"positions other than the query's, -1, need streams with the query last, got it at {max(places)}."
        )
    columns = [list(positions) if at == -1 else [at] * len(positions) for at in places]
    with masked(hooked, heads):
        return _by_layer(hooked, prompts, names, lambda layer, values: values[:, columns[layer]])


def stream(
    hooked: HookedPredictor, prompts: Prompts, layer: int
) -> Float[Tensor, "batch pos d_model"]:
    """Stream at every position after `layer` layers."""
    chunks = [prompts[rows] for rows in hooked.chunks(prompts, CHUNK)]
    if layer < hooked.n_layers and hooked.restarts:
        inputs = map(hooked.inputs, chunks)
        return torch.cat([hooked.model(each, stop_at_layer=layer) for each in inputs])
    # A Bridge does not stop after the last layer: it would return its prediction.
    name = hooked.stream_name(layer)
    return torch.cat([hooked.activations(chunk, [name])[1][0] for chunk in chunks])


def one_width(hooked: HookedPredictor, prompts: Prompts) -> bool:
    """True if the stream has the same width before each layer and after the last."""
    names = [hooked.stream_name(layer) for layer in range(hooked.n_layers + 1)]
    _, streams = hooked.activations(prompts[:1], names)
    return len({stream.shape[-1] for stream in streams}) == 1


def predict_from(
    hooked: HookedPredictor, prompts: Prompts, layer: int, at_query: Float[Tensor, "batch d_model"]
) -> Float[Tensor, "batch d_y"]:
    """Predictions, with the stream at the query after `layer` layers set to the given one."""
    name, place = hooked.stream_name(layer), query_positions(hooked, prompts)[layer]
    parts = []
    for rows in hooked.chunks(prompts, CHUNK):

        def put(stream: Tensor, hook: object, own: Tensor = at_query[rows]) -> Tensor:
            stream = stream.clone()
            stream[:, place] = own.to(stream)
            return stream

        output = hooked.run(hooked.inputs(prompts[rows]), [(name, put)])
        parts.append(hooked.prediction(output, prompts[rows]))
    return torch.cat(parts)


def query_streams(
    hooked: HookedPredictor, prompts: Prompts, layer: int
) -> Float[Tensor, "batch pos d_model"]:
    """Stream after `layer` layers at the query, with each covariate in turn as the query; the prompt's own query is last."""
    place = query_positions(hooked, prompts)[layer]
    covariates = progress([*prompts.x.unbind(1), prompts.x_query], "every token as the query")
    runs = (stream(hooked, replace(prompts, x_query=x), layer) for x in covariates)
    # A copy, so that the whole stream of each run is freed.
    return torch.stack([values[:, place].clone() for values in runs], dim=1)


def query_patterns(
    hooked: HookedPredictor, prompts: Prompts
) -> Float[Tensor, "layer batch head key"]:
    """Attention weights of the query in every layer, exact ones for layers that are linear in their values and have no
    hook on a pattern; layers with fewer keys are padded with zeros."""
    # Imported here, because it loads TransformerLens.
    from mechinterp.models.run.exact import patterns

    one = prompts[:1]
    rows = _query_rows(hooked, one, patterns(hooked, one))
    chunks = []
    for some in hooked.chunks(prompts, CHUNK):
        every = patterns(hooked, prompts[some])
        parts = [pattern[:, :, row] for pattern, row in zip(every, rows, strict=True)]
        widest = max(each.shape[-1] for each in parts)
        chunks.append(torch.stack([pad(each, (0, widest - each.shape[-1])) for each in parts]))
    return torch.cat(chunks, dim=1)


def query_writes(
    hooked: HookedPredictor, prompts: Prompts
) -> Float[Tensor, "layer batch head d_model"] | None:
    """Output of each head at the query; None if some layer has no attribute `W_O`."""
    blocks: Any = hooked.model.blocks
    outputs = (getattr(getattr(block, "attn", None), "W_O", None) for block in blocks)
    matrices = [W_O for W_O in outputs if isinstance(W_O, Tensor)]
    if len(matrices) < hooked.n_layers:
        return None
    names = [z_name(layer) for layer in range(hooked.n_layers)]
    places = query_positions(hooked, prompts)
    equation = "batch head d_head, head d_head d_model -> batch head d_model"

    def written(layer: int, z: Tensor) -> Tensor:
        return einsum(z[:, places[layer]], matrices[layer], equation)

    return _by_layer(hooked, prompts, names, written)


def read_out(
    hooked: HookedPredictor, stream: Float[Tensor, "batch d_model"], prompts: Prompts
) -> Float[Tensor, "batch d_y"]:
    """The model's own read-out of a stream at the query. Other positions get the stream of other prompts."""
    name, place = hooked.stream_name(hooked.n_layers), query_positions(hooked, prompts)[-1]
    parts = []
    for rows in hooked.chunks(prompts, CHUNK):

        def put(values: Tensor, hook: object, own: Tensor = stream[rows]) -> Tensor:
            others = values.flip(0)
            # Streams were padded to one width.
            others[:, place] = own[:, : values.shape[-1]].to(values)
            return others

        inputs = hooked.inputs(prompts[rows])
        output = hooked.run(inputs, [(name, put)])
        parts.append(hooked.prediction(output, prompts[rows]))
    return torch.cat(parts)


def _by_layer(
    hooked: HookedPredictor,
    prompts: Prompts,
    names: Sequence[str],
    part: Callable[[int, Tensor], Float[Tensor, "_batch axis _width"]],
) -> Float[Tensor, "layer batch axis width"]:
    """Part of the activation at the hook of each layer; narrower layers are padded with zeros."""
    chunks = []
    for rows in hooked.chunks(prompts, CHUNK):
        _, activations = hooked.activations(prompts[rows], names)
        parts = [part(layer, values) for layer, values in enumerate(activations)]
        widest = max(each.shape[-1] for each in parts)
        chunks.append(torch.stack([pad(each, (0, widest - each.shape[-1])) for each in parts]))
    return torch.cat(chunks, dim=1)


def _query_rows(
    hooked: HookedPredictor, prompts: Prompts, every: Sequence[Float[Tensor, "batch head row key"]]
) -> list[int]:
    """Row of the query in each pattern: the last row if the stream is unknown and each input position has a row."""
    try:
        return query_positions(hooked, prompts)[:-1]
    except NoStreamError:
        if {each.shape[2] for each in every} != {hooked.inputs(prompts).shape[1]}:
            raise
        return [-1] * len(every)
