"""Masks and streams of linear attention, computed as a linear map of the tokens instead of a pass over them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.config.model import LINEAR
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import CHUNK, chunks, together
from mechinterp.models.hooked.masks import Head, by_layers, mean_z, swapped
from mechinterp.models.weights import Weights
from mechinterp.progress import progress

NEAR = 2**25
"""Largest size of a chunk of prompts in bytes, small enough for the processor's cache."""
_NARROW = 256
"""If d_head times (n_heads d_head) is at most this, one masked product over all heads is faster than one product
per head."""


def masked_predictions(
    weights: Weights, prompts: Prompts, masks: Sequence[Sequence[Head]], *, method: str = "zero"
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask; z of a masked head is 0, its mean over the prompts, or that of another prompt."""
    by_layer, parts = [by_layers(heads) for heads in masks], []
    means: list[Tensor] = []
    replaces = method != "zero"
    rows_of_chunks = _chunks(weights, prompts, with_z=replaces)
    if method == "mean":
        runs = (linear_pass(weights, prompts[rows]) for rows in rows_of_chunks)
        pairs = zip(runs, rows_of_chunks, strict=True)
        means = mean_z((run.every_z(prompts[rows]) for run, rows in pairs), len(prompts))
    for rows in progress(rows_of_chunks, f"masking heads ({method})"):
        chunk = prompts[rows]
        short = linear_pass(weights, chunk)
        run: LinearPass | ReplacedPass = short
        if method == "resample":
            run = ReplacedPass(short, chunk, [swapped(z) for z in short.every_z(chunk)])
        elif method == "mean":
            run = ReplacedPass(short, chunk, [mean.to(chunk.x)[None] for mean in means])
        parts.append(torch.stack([run.prediction(heads) for heads in by_layer]))
    return torch.cat(parts, dim=1)


def streams(
    weights: Weights,
    prompts: Prompts,
    *,
    heads: Sequence[Head],
    positions: Sequence[int],
) -> Float[Tensor, "layer batch pos d_model"]:
    """Stream before each layer and after the last, with heads masked."""
    parts = []
    for rows in _chunks(weights, prompts):
        chunk = prompts[rows]
        tokens = chunk.tokens[:, list(positions)]
        maps, _ = _maps(weights, _moment(weights, chunk), weights.n_layers, heads)
        parts.append(torch.stack([tokens @ T for T in maps]))
    return torch.cat(parts, dim=1)


def query_writes(weights: Weights, prompts: Prompts) -> Float[Tensor, "layer batch head d_model"]:
    """Output of each head at the query."""
    parts, heads = [], (weights.n_heads, weights.d_head)
    for rows in _chunks(weights, prompts):
        run = linear_pass(weights, prompts[rows])
        z = [(run.x_query[:, None] @ z[:, : weights.d_x]).unflatten(-1, heads) for z in run.z]
        each = [*(own[:, 0] for own in z), run.last_z()]
        parts.append(torch.stack(each).transpose(1, 2) @ weights.W_O)
    return torch.cat(parts, dim=2).transpose(1, 2)


def stack_bytes(weights: Weights, length: int) -> int:
    """Memory that one prompt of this many pairs takes while it runs through the layers, in bytes.

    Example:
        >>> from mechinterp.models.constructions.stack import stack_of_layers
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> weights = stack_of_layers(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0)
        >>> stack_bytes(weights, 40)
        4680
    """
    # Tokens, their second moment, and a map for each layer.
    n_tokens, d_token, d_model = length + 1, weights.d_x + weights.d_y, weights.d_model
    columns = weights.n_heads * weights.d_head
    maps = weights.n_layers * d_token * (d_model + 2 * columns)
    layer = d_token * (6 * columns + 2 * d_model) + 2 * columns * d_model
    return weights.dtype.itemsize * (3 * n_tokens * d_token + 2 * d_token**2 + maps + layer)


def _chunks(weights: Weights, prompts: Prompts, *, with_z: bool = False) -> list[slice]:
    """Slices of the prompts that run together in memory; `with_z`: z of all layers at every position is kept twice."""
    length = prompts.x.shape[1]
    what = f"{weights.n_layers} layers on prompts of {length} pairs"
    size = stack_bytes(weights, length)
    if with_z:
        columns = weights.n_layers * weights.n_heads * weights.d_head
        size += 2 * weights.dtype.itemsize * (length + 1) * columns
    return chunks(len(prompts), together(size, what, most=min(CHUNK, max(2, NEAR // size))))


@dataclass(frozen=True, eq=False)
class LinearPass:
    """Forward pass of linear attention over prompts, stored so that a masked pass can start at any layer.

    Its cost does not grow with the context: given the context's second moment M, every layer is linear in the tokens.
    H_l = tokens T_l with T_0 = W_in; with q, k and v equal to T_l times W_Q, W_K and W_V,
    T_{l+1} = T_l + sum_h q_h (k_h^T M v_h) W_O,h.
    """

    weights: Weights
    x_query: Float[Tensor, "batch d_x"]
    moment: Float[Tensor, "batch d_token d_token"]
    """M, times the factor on the scores."""
    T: list[Tensor]
    """T before each layer, [batch, d_token, d_model]. The first is W_in, the same for all prompts."""
    z: list[Tensor]
    """q_h (k_h^T M v_h) of each layer except the last, heads side by side, [batch, d_token, columns]."""

    def prediction(
        self, masked: Mapping[int, Collection[int]] | None = None
    ) -> Float[Tensor, "batch d_y"]:
        """Prediction at the query in units of y; `masked` gives the masked heads by layer."""
        masked, last = masked or {}, self.weights.n_layers - 1
        first = min(masked, default=last)
        query, reads = (
            self._last_reads if first == last else self._reads(self._rerun(masked, first))
        )
        _, W_U = self.weights.reading
        written = self.weights.W_V[-1] @ (_kept(self.weights, masked, last) @ W_U)
        return query @ W_U + reads.flatten(1) @ written.flatten(0, 1)

    def every_z(self, prompts: Prompts) -> list[Float[Tensor, "batch pos head d_head"]]:
        """z of each layer at every position, of the last layer at the query alone; `prompts` are those of the pass."""
        heads = (self.weights.n_heads, self.weights.d_head)
        every = [(prompts.tokens @ z).unflatten(2, heads) for z in self.z]
        return [*every, self.last_z()[:, None]]

    def last_z(self) -> Float[Tensor, "batch head d_head"]:
        """z of the last layer at the query."""
        _, reads = self._last_reads
        return (reads.transpose(0, 1) @ self.weights.W_V[-1]).transpose(0, 1)

    def _rerun(self, masked: Mapping[int, Collection[int]], first: int) -> Tensor:
        """T before the last layer with masks from layer `first` on; masked outputs of `first` are subtracted."""
        gone, T = sorted(set(masked[first])), self.T[first]
        if len(gone) < self.weights.n_heads:
            z = self.z[first].unflatten(-1, (self.weights.n_heads, -1))[:, :, gone].flatten(2)
            T = self.T[first + 1] - z @ self.weights.W_O[first, gone].flatten(0, 1)
        for layer in range(first + 1, self.weights.n_layers - 1):
            z = linear_heads(self.weights, layer, T, self.moment)
            T = T + z @ _kept(self.weights, masked, layer).flatten(0, 1)
        return T

    @cached_property
    def _last_reads(self) -> tuple[Tensor, Tensor]:
        """Last layer's inputs without masks in earlier layers."""
        return self._reads(self.T[-1])

    def _reads(
        self, T: Tensor
    ) -> tuple[Float[Tensor, "batch d_model"], Float[Tensor, "batch head d_model"]]:
        """Query's stream before the last layer, and each head's weighted sum of streams there, before W_V."""
        T = T.expand(len(self.x_query), -1, -1)
        query = (self.x_query[:, None] @ T[:, : self.weights.d_x])[:, 0]
        key_side = _key_side(self.weights, query) @ T.mT  # [batch, head, d_token]
        return query, key_side @ self.moment @ T


@dataclass(frozen=True, eq=False)
class ReplacedPass:
    """Masked passes in which z of masked heads has other values.

    The values become further columns of the tokens, so that the stream stays a linear map of the tokens: with V for z of
    the masked heads, [tokens, V] [T; W_O] = tokens T + V W_O.
    """

    run: LinearPass
    """The pass without masks."""
    prompts: Prompts
    values: list[Tensor]
    """Values of z by layer, [batch or 1, pos, head, d_head]; of the last layer at the query alone."""

    def prediction(
        self, masked: Mapping[int, Collection[int]] | None = None
    ) -> Float[Tensor, "batch d_y"]:
        """Prediction at the query in units of y; `masked` gives the masked heads by layer."""
        run, weights = self.run, self.run.weights
        if not masked:
            return run.prediction()
        last, n = weights.n_layers - 1, len(self.prompts)
        first = min(masked)
        state = _Extended(
            run.T[min(first, last)].expand(n, -1, -1),
            self.prompts.context_tokens,
            pad(run.x_query, (0, weights.d_y)),
            run.moment,
        )
        for layer in range(first, last):
            z = run.z[first] if layer == first else None
            z = linear_heads(weights, layer, state.T, state.moment) if z is None else z
            gone = sorted(set(masked.get(layer, ())))
            state = replace(state, T=state.T + z @ _kept(weights, masked, layer).flatten(0, 1))
            if gone:
                values = self.values[layer][:, :, gone].flatten(2).expand(n, -1, -1)
                written = weights.W_O[layer, gone].flatten(0, 1)
                state = state.with_values(
                    values, written, factor_on_scores(weights, self.prompts.x.shape[1])
                )
        return self._read_out(state, masked)

    def _read_out(self, state: "_Extended", masked: Mapping[int, Collection[int]]) -> Tensor:
        """Prediction from the map before the last layer, whose masked heads get their values at the query."""
        weights, last = self.run.weights, self.run.weights.n_layers - 1
        query = (state.at_query[:, None] @ state.T)[:, 0]
        key_side = _key_side(weights, query) @ state.T.mT
        reads = key_side @ state.moment @ state.T
        _, W_U = weights.reading
        written = weights.W_V[-1] @ (_kept(weights, masked, last) @ W_U)
        out = query @ W_U + reads.flatten(1) @ written.flatten(0, 1)
        if not (gone := sorted(set(masked.get(last, ())))):
            return out
        values = self.values[last][:, -1, gone].flatten(1)
        return out + values @ (weights.W_O[last, gone].flatten(0, 1) @ W_U)


@dataclass(frozen=True, eq=False)
class _Extended:
    """Tokens with further columns, their map to the stream, and their second moment."""

    T: Float[Tensor, "batch column d_model"]
    context: Float[Tensor, "batch pair column"]
    at_query: Float[Tensor, "batch column"]
    moment: Float[Tensor, "batch column column"]
    """Second moment of the context, times the factor on the scores."""

    def with_values(
        self,
        values: Float[Tensor, "batch pos new"],
        written: Float[Tensor, "new d_model"],
        factor: float,
    ) -> "_Extended":
        """The same with values as further columns, which `written` maps to the stream."""
        new = values[:, :-1]
        across = factor * (self.context.mT @ new)
        above = torch.cat([self.moment, across], 2)
        below = torch.cat([across.mT, factor * (new.mT @ new)], 2)
        return _Extended(
            torch.cat([self.T, written.expand(len(values), -1, -1)], 1),
            torch.cat([self.context, new], 2),
            torch.cat([self.at_query, values[:, -1]], 1),
            torch.cat([above, below], 1),
        )


def linear_pass(weights: Weights, prompts: Prompts) -> LinearPass:
    """Forward pass of linear attention over prompts.

    Raises:
        ValueError: If the scores are not linear.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> from mechinterp.models.constructions.stack import stack_of_layers
        >>> ones = torch.ones(2, 1, 6, 3)
        >>> weights = stack_of_layers(ones, ones, ones, ones.mT, d_y=1, scale=1.0, score="linear/L")
        >>> linear_pass(weights, draw_prompts(TaskConfig(), 8, seed=0)).prediction({0: [0], 1: [0]}).any()
        tensor(False)
    """
    moment = _moment(weights, prompts)
    T, z = _maps(weights, moment, weights.n_layers - 1)
    return LinearPass(weights, prompts.x_query, moment, T, z)


def _maps(
    weights: Weights,
    moment: Float[Tensor, "batch d_token d_token"],
    n_layers: int,
    heads: Sequence[Head] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """T before each of the first layers and after the last of them, and z of each, as in `LinearPass`; `heads` are masked.

    The stream is tokens @ T, for the prompt's own tokens and for any other query token after the same context.
    """
    T, z, masked = [weights.reading[0][None]], [], by_layers(heads)
    for layer in range(n_layers):
        z.append(linear_heads(weights, layer, T[-1], moment))
        T.append(T[-1] + z[-1] @ _kept(weights, masked, layer).flatten(0, 1))
    return T, z


def _moment(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch d_token d_token"]:
    """Second moment of the context, times the factor on the scores."""
    tokens = prompts.context_tokens
    return factor_on_scores(weights, prompts.x.shape[1]) * (tokens.mT @ tokens)


def factor_on_scores(weights: Weights, n_pairs: int) -> float:
    """Factor on the scores of linear attention to this number of pairs.

    Raises:
        ValueError: If the scores are not linear.
    """
    score = weights.model.score
    if score not in LINEAR:
        raise ValueError(f"score must be one of {', '.join(LINEAR)}, got {score!r}.")
    factor = weights.scale * weights.model.score_slope
    return factor / max(n_pairs, 1) if score == "linear/L" else factor  # no pairs: the moment is 0


def _key_side(
    weights: Weights, query: Float[Tensor, "batch d_model"]
) -> Float[Tensor, "batch head d_model"]:
    """Key-side vectors of the last layer's heads for the query's stream: W_K W_Q^T query."""
    q = query @ weights.W_Q[-1].transpose(0, 1).flatten(1)
    q = q.unflatten(1, (weights.n_heads, weights.d_head)).transpose(0, 1)
    return (q @ weights.W_K[-1].mT).transpose(0, 1)


def _kept(
    weights: Weights, masked: Mapping[int, Collection[int]], layer: int
) -> Float[Tensor, "head d_head d_model"]:
    """W_O of a layer, with zeros for masked heads."""
    W_O = weights.W_O[layer]
    if layer not in masked:
        return W_O
    gone = torch.zeros(weights.n_heads, dtype=torch.bool, device=W_O.device)
    gone[list(masked[layer])] = True
    return W_O.masked_fill(gone[:, None, None], 0)


def linear_heads(
    weights: Weights, layer: int, T: Tensor, moment: Tensor
) -> Float[Tensor, "batch d_token columns"]:
    """q_h (k_h^T M v_h) of all heads of a layer, side by side."""
    stacked = torch.stack([weights.W_Q[layer], weights.W_K[layer], weights.W_V[layer]])
    # All heads side by side, in this order: [d_model, columns].
    q, k, v = (T @ stacked.permute(2, 0, 1, 3).flatten(1)).chunk(3, dim=-1)
    heads = (weights.n_heads, weights.d_head)
    if weights.d_head * q.shape[-1] <= _NARROW:
        head = torch.arange(weights.n_heads, device=q.device).repeat_interleave(weights.d_head)
        own = head[:, None] == head
        return q @ (k.mT @ (moment @ v) * own)
    q, k, Mv = (part.unflatten(-1, heads).transpose(1, 2) for part in (q, k, moment @ v))
    return (q @ (k.mT @ Mv)).transpose(1, 2).flatten(2)
