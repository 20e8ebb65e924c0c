"""Linear attention as a map of the tokens: masks and streams without a run token by token."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import chunks, together, token_map_bytes
from mechinterp.models.hooked.masks import Head, by_layers
from mechinterp.models.scores import LINEAR
from mechinterp.models.weights import Weights
from mechinterp.progress import ProgressCallback, no_progress

CHUNK = 256  # small enough for a processor's cache, and even
Masked = Mapping[int, Collection[int]]
"""Masked heads by layer."""
NOTHING: Masked = {}


def masked_predictions(
    weights: Weights,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    progress: ProgressCallback = no_progress,
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask, a masked head's output being zero."""
    by_layer = [by_layers(heads) for heads in masks]
    parts = []
    for rows in progress(_chunks(weights, prompts), "masking heads (zero)"):
        short = linear_pass(weights, prompts[rows])
        parts.append(torch.stack([short.prediction(heads) for heads in by_layer]))
    return torch.cat(parts, dim=1)


def streams(
    weights: Weights,
    prompts: Prompts,
    *,
    heads: Sequence[Head],
    positions: Sequence[int],
) -> Float[Tensor, "layer batch pos d_model"]:
    """The stream before each layer and after the last, with heads masked."""
    parts = []
    for rows in _chunks(weights, prompts):
        chunk = prompts[rows]
        tokens = chunk.tokens[:, list(positions)]
        maps = _maps(weights, _moment(weights, chunk), by_layers(heads))
        parts.append(torch.stack([tokens @ T for T in maps]))
    return torch.cat(parts, dim=1)


def query_streams(
    weights: Weights, prompts: Prompts, layer: int, *, heads: Sequence[Head]
) -> Float[Tensor, "batch pos d_model"]:
    """The stream after some layers of every covariate of a prompt run as its query, the query's own last."""
    parts = []
    for rows in _chunks(weights, prompts):
        chunk = prompts[rows]
        x = torch.cat([chunk.x, chunk.x_query[:, None]], dim=1)
        maps = _maps(weights, _moment(weights, chunk), by_layers(heads))
        T = next(islice(maps, layer, None))
        parts.append(x @ T[:, : weights.d_x])
    return torch.cat(parts)


def stack_bytes(weights: Weights, length: int) -> int:
    """What a prompt of this many pairs takes while it runs through the layers.

    Example:
        >>> from mechinterp.models.constructions.stack import stack_of_layers
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> weights = stack_of_layers(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0)
        >>> stack_bytes(weights, 40)
        4680
    """
    return token_map_bytes(
        n_layers=weights.n_layers,
        n_heads=weights.n_heads,
        d_head=weights.d_head,
        d_model=weights.d_model,
        d_token=weights.d_x + weights.d_y,
        n_tokens=length + 1,
        width=weights.W_O.element_size(),
    )


def _chunks(weights: Weights, prompts: Prompts) -> list[slice]:
    length = prompts.x.shape[1]
    what = f"{weights.n_layers} layers on prompts of {length} pairs"
    return chunks(len(prompts), together(stack_bytes(weights, length), what, most=CHUNK))


@dataclass(frozen=True, eq=False)
class LinearPass:
    """One pass of linear attention over prompts, at each layer of which a masked one can set in.

    Its cost does not grow with the context: every layer is linear in the tokens, given the second moment M of the
    context. H_l = tokens T_l with T_0 = W_in; with k_h and v_h for T_l times W_K,h and W_V,h the circuits of a layer are
    C_h = k_h^T M v_h, and T_{l+1} = T_l + T_l sum_h W_Q,h C_h W_O,h. What a head adds has the rank d_head, so that
    without it the circuits of the next layer differ from those known by products of that rank.
    """

    weights: Weights
    x_query: Float[Tensor, "batch d_x"]
    moment: Float[Tensor, "batch d_token d_token"]
    """M, with the factor on the scores."""
    values: list[Float[Tensor, "head d_model _"]]
    """W_V of each layer; of the last what the prediction reads of it, W_V W_O W_U."""
    T: list[Tensor]
    """Before each layer, [batch, d_token, d_model]; W_in before the first, the same for all prompts."""
    kv: list[tuple[Tensor, Tensor]]
    """k and v of each layer, heads side by side, [batch, d_token, columns]."""
    C: list[Tensor]
    """Circuits of each layer, [batch, head, d_head, columns of a head's v]."""

    def prediction(self, masked: Masked = NOTHING) -> Float[Tensor, "batch d_y"]:
        """The prediction at the query with heads masked, in units of y."""
        weights, last = self.weights, self.weights.n_layers - 1
        layer = min(masked, default=last)
        T, C = self.T[layer], self.C[layer]
        if layer < last:
            T, C = self._without(layer, masked[layer])
            layer += 1
        while layer < last:
            T = _after(weights, layer, T, _kept(C, layer, masked))
            layer += 1
            C = _circuits(
                self.moment, *_kv(weights.W_K[layer], self.values[layer], T), weights.n_heads
            )
        query = self.x_query[:, None] @ T[:, : weights.d_x]
        q = query @ weights.W_Q[last].transpose(0, 1).flatten(1)
        read = q @ _kept(C, last, masked).flatten(1, 2)
        return (query @ weights.reading[1] + read)[:, 0]

    def _without(self, layer: int, heads: Collection[int]) -> tuple[Tensor, Tensor]:
        """T and circuits of the next layer without heads of a layer, which add -A r."""
        weights, chosen = self.weights, list(heads)
        A = -(self.T[layer][:, None] @ weights.W_Q[layer, chosen] @ self.C[layer][:, chosen])
        A, r = A.transpose(1, 2).flatten(2), weights.W_O[layer, chosen].flatten(0, 1)
        k, v = r @ weights.W_K[layer + 1], r @ self.values[layer + 1]  # [head, rank, columns]
        AM, by_head = A.mT @ self.moment, (weights.n_heads, -1)
        with_k, with_v = ((AM @ part).unflatten(2, by_head) for part in self.kv[layer + 1])
        with_v = with_v + torch.einsum("brs,hsj->brhj", AM @ A, v)
        C = self.C[layer + 1] + torch.einsum("hri,brhj->bhij", k, with_v)
        return self.T[layer + 1] + A @ r, C + torch.einsum("brhi,hrj->bhij", with_k, v)


def linear_pass(weights: Weights, prompts: Prompts) -> LinearPass:
    """Linear attention run over prompts.

    Raises:
        ValueError: If the scores are not linear.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import sample_prompts
        >>> from mechinterp.models.constructions.stack import stack_of_layers
        >>> ones = torch.ones(2, 1, 6, 3)
        >>> weights = stack_of_layers(ones, ones, ones, ones.mT, d_y=1, scale=1.0, score="linear/L")
        >>> linear_pass(weights, sample_prompts(TaskConfig(), 8, seed=0)).prediction({0: [0], 1: [0]}).any()
        tensor(False)
    """
    moment = _moment(weights, prompts)
    values = [*weights.W_V[:-1], weights.W_V[-1] @ weights.W_O[-1] @ weights.reading[1]]
    T: list[Tensor] = [weights.reading[0][None]]
    kv: list[tuple[Tensor, Tensor]] = []
    C: list[Tensor] = []
    for layer, W_V in enumerate(values):
        if layer:
            T.append(_after(weights, layer - 1, T[-1], C[-1]))
        kv.append(_kv(weights.W_K[layer], W_V, T[-1]))
        C.append(_circuits(moment, *kv[-1], weights.n_heads))
    return LinearPass(weights, prompts.x_query, moment, values, T, kv, C)


def _maps(
    weights: Weights, moment: Tensor, masked: Masked
) -> Iterator[Float[Tensor, "_batch d_token d_model"]]:
    """T before each layer and after the last: the stream is the tokens times it, whether the tokens are the
    prompt's or others before the same context."""
    T = weights.reading[0][None]
    yield T
    for layer in range(weights.n_layers):
        C = _circuits(moment, *_kv(weights.W_K[layer], weights.W_V[layer], T), weights.n_heads)
        T = _after(weights, layer, T, _kept(C, layer, masked))
        yield T


def _moment(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch d_token d_token"]:
    """The second moment of the context, with the factor on the scores."""
    score, tokens = weights.model.score, prompts.context_tokens
    if score not in LINEAR:
        raise ValueError(f"score must be one of {', '.join(LINEAR)}, got {score!r}.")
    factor = weights.scale * weights.model.score_slope
    if score == "linear/L":
        factor = factor / tokens.shape[1]
    return factor * (tokens.mT @ tokens)


def _kv(
    W_K: Float[Tensor, "head d_model d_head"],
    W_V: Float[Tensor, "head d_model _"],
    T: Float[Tensor, "_batch d_token d_model"],
) -> tuple[Tensor, Tensor]:
    """k and v of all heads, side by side."""
    wide = [part.transpose(0, 1).flatten(1) for part in (W_K, W_V)]
    k, v = (T @ torch.cat(wide, dim=1)).split([part.shape[1] for part in wide], dim=-1)
    return k, v


def _circuits(
    moment: Float[Tensor, "batch d_token d_token"], k: Tensor, v: Tensor, n_heads: int
) -> Float[Tensor, "batch head d_head _"]:
    """k_h^T M v_h of all heads."""
    k, Mv = (part.unflatten(2, (n_heads, -1)).transpose(1, 2) for part in (k, moment @ v))
    return k.mT @ Mv


def _after(
    weights: Weights,
    layer: int,
    T: Float[Tensor, "_batch d_token d_model"],
    C: Float[Tensor, "batch head d_head d_head"],
) -> Float[Tensor, "batch d_token d_model"]:
    """T after a layer with these circuits."""
    q = T @ weights.W_Q[layer].transpose(0, 1).flatten(1)
    written = (C @ weights.W_O[layer]).flatten(1, 2)
    return torch.baddbmm(T.expand(len(C), -1, -1), q.expand(len(C), -1, -1), written)


def _kept(C: Float[Tensor, "batch head d_head _"], layer: int, masked: Masked) -> Tensor:
    """Circuits of a layer, zero for masked heads."""
    if layer not in masked:
        return C
    gone = torch.zeros(C.shape[1], dtype=torch.bool, device=C.device)
    gone[list(masked[layer])] = True
    return C.masked_fill(gone[:, None, None], 0)
