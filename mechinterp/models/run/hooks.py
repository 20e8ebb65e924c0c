"""Masks and streams of any hooked model, computed with its hooks.

Everything before a masked head is reused, so that each mask costs only the later layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head, mean_z, mlp_name, pattern_name, swapped, z_name
from mechinterp.models.hooked.query_position import NoStreamError, query_positions
from mechinterp.models.hooked.runner import HookedPredictor, masked
from mechinterp.progress import ProgressCallback

CHUNK = 256  # prompts at once: they fit into the CPU cache, and an even number swaps in pairs


@dataclass(frozen=True, eq=False)
class ByHooks:
    """A hooked model of any kind, run through its hooks."""

    build: Callable[[], HookedPredictor]

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Predictions, in chunks; for all prompts at once under hooks of the user, which may depend on the whole batch."""
        hooked = self.build()
        if any(point.fwd_hooks for point in hooked.model.hook_dict.values()):
            return hooked.predict(prompts)
        rows = hooked.chunks(prompts, CHUNK)
        with torch.no_grad():
            return torch.cat([hooked.predict(prompts[each]) for each in rows])

    def predict_at_every(self, prompts: Prompts) -> Float[Tensor, "batch n_pairs d_y"] | None:
        """Output at every x of one pass; None if the output does not have that shape."""
        return self.build().predict_at_every(prompts)

    def run(
        self,
        prompts: Prompts,
        masks: Sequence[Sequence[Head]],
        *,
        method: str,
        progress: ProgressCallback,
        mlps: Sequence[Sequence[int]] | None = None,
        at: int | None = None,
    ) -> Float[Tensor, "mask batch d_y"]:
        """Predictions under each mask, equal to a separate hooked run for each."""
        hooked, n = self.build(), self.build().n_layers
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
        self, prompts: Prompts, heads: Sequence[Head], positions: Sequence[int]
    ) -> Float[Tensor, "layer batch pos d_model"]:
        """Stream before each layer and after the last, with heads masked. Narrower streams are padded with zeros."""
        hooked = self.build()
        names = [hooked.stream_name(layer) for layer in range(hooked.n_layers + 1)]
        columns = _columns(query_positions(hooked, prompts), positions)
        parts = []
        with masked(hooked, heads):
            for rows in hooked.chunks(prompts, CHUNK):
                _, every_stream = hooked.activations(prompts[rows], names)
                by_layer = zip(every_stream, columns, strict=True)
                parts.append(_stacked([stream[:, at] for stream, at in by_layer]))
        return torch.cat(parts, dim=1)

    def stream(
        self, prompts: Prompts, layer: int, heads: Sequence[Head] = ()
    ) -> Float[Tensor, "batch pos d_model"]:
        """Stream at every position after `layer` layers, with heads masked."""
        hooked = self.build()
        chunks = [prompts[rows] for rows in hooked.chunks(prompts, CHUNK)]
        with masked(hooked, heads):
            if layer < hooked.n_layers and hooked.restarts:
                inputs = map(hooked.inputs, chunks)
                return torch.cat([hooked.model(each, stop_at_layer=layer) for each in inputs])
            # A Bridge does not stop after the last layer: it would return its prediction.
            name = hooked.stream_name(layer)
            return torch.cat([hooked.activations(chunk, [name])[1][0] for chunk in chunks])

    def query_streams(
        self, prompts: Prompts, layer: int, heads: Sequence[Head], progress: ProgressCallback
    ) -> Float[Tensor, "batch pos d_model"]:
        """Stream after `layer` layers at the query, with each covariate in turn as the query."""
        place = query_positions(self.build(), prompts)[layer]
        covariates = progress([*prompts.x.unbind(1), prompts.x_query], "every token as the query")
        runs = (self.stream(replace(prompts, x_query=x), layer, heads) for x in covariates)
        # A copy, so that the whole stream of each run is freed.
        return torch.stack([stream[:, place].clone() for stream in runs], dim=1)

    def query_patterns(self, prompts: Prompts) -> Float[Tensor, "layer batch head key"]:
        """Attention weights of the query in every layer; layers with fewer keys are padded with zeros."""
        hooked = self.build()
        names = [pattern_name(layer) for layer in range(hooked.n_layers)]
        places, parts = _query_rows(hooked, prompts[:1], names), []
        for rows in hooked.chunks(prompts, CHUNK):
            _, patterns = hooked.activations(prompts[rows], names)
            by_layer = zip(patterns, places, strict=True)
            parts.append(_stacked([pattern[:, :, at] for pattern, at in by_layer]))
        return torch.cat(parts, dim=1)

    def query_writes(self, prompts: Prompts) -> Float[Tensor, "layer batch head d_model"] | None:
        """Output of each head at the query; None if some layer has no attribute `W_O`."""
        hooked = self.build()
        blocks: Any = hooked.model.blocks
        outputs = (getattr(getattr(block, "attn", None), "W_O", None) for block in blocks)
        matrices = [W_O for W_O in outputs if isinstance(W_O, Tensor)]
        equation = "batch head d_head, head d_head d_model -> batch head d_model"
        if len(matrices) < hooked.n_layers:
            return None
        names = [z_name(layer) for layer in range(hooked.n_layers)]
        places, parts = query_positions(hooked, prompts), []
        for rows in hooked.chunks(prompts, CHUNK):
            _, every_z = hooked.activations(prompts[rows], names)
            by_layer = zip(every_z, places[:-1], matrices, strict=True)
            written = [einsum(z[:, at], W_O, equation) for z, at, W_O in by_layer]
            parts.append(torch.stack(written))
        return torch.cat(parts, dim=1)

    def read_out(
        self, stream: Float[Tensor, "batch d_model"], prompts: Prompts
    ) -> Float[Tensor, "batch d_y"]:
        """Model's own read-out of a stream at the query. Other positions get the stream of other prompts."""
        hooked = self.build()
        name, place = hooked.stream_name(hooked.n_layers), query_positions(hooked, prompts)[-1]
        parts = []
        for rows in hooked.chunks(prompts, CHUNK):

            def put(values: Tensor, hook: object, own: Tensor = stream[rows]) -> Tensor:
                held = values.flip(0)
                # Streams were padded to one width.
                held[:, place] = own[:, : values.shape[-1]].to(values)
                return held

            inputs = hooked.inputs(prompts[rows])
            output = hooked.model.run_with_hooks(inputs, fwd_hooks=[(name, put)])
            parts.append(hooked.prediction(output, prompts[rows]))
        return torch.cat(parts)


def _columns(places: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
    """Positions to take from each stream; -1 is replaced by the query's position."""
    if set(places) != {-1} and set(positions) != {-1}:
        raise ValueError(
            f"positions other than the query's, -1, need streams with the query last, got it at {max(places)}."
        )
    return [list(positions) if place == -1 else [place] * len(positions) for place in places]


def _stacked(
    streams: Sequence[Float[Tensor, "batch axis _width"]],
) -> Float[Tensor, "layer batch axis width"]:
    """Streams or patterns of all layers in one tensor; narrower layers are padded with zeros."""
    widest = max(stream.shape[-1] for stream in streams)
    return torch.stack([pad(stream, (0, widest - stream.shape[-1])) for stream in streams])


def _query_rows(hooked: HookedPredictor, prompts: Prompts, names: Sequence[str]) -> list[int]:
    """Row of the query in each pattern: the last row if the stream is unknown and each input position has a row."""
    _, patterns = hooked.activations(prompts, names)
    try:
        return query_positions(hooked, prompts)[:-1]
    except NoStreamError:
        if {each.shape[2] for each in patterns} != {hooked.inputs(prompts).shape[1]}:
            raise
        return [-1] * len(names)
