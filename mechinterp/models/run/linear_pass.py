"""Forward pass of linear attention as a linear map of the tokens, and masked passes that start from its parts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.config.model import LINEAR
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head, by_layers
from mechinterp.models.weights import Weights

_NARROW = 256
"""If d_head times (n_heads d_head) is at most this, one masked product over all heads is faster than one product
per head."""


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
    qkv: list[Tensor]
    """q, then k, then v of each layer except the last, heads side by side, [batch, d_token, 3 columns]; of the first, one for
    all prompts."""

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
        T, qkv = self.after_masked(first, sorted(set(masked[first])))
        for layer in range(first + 1, self.weights.n_layers - 1):
            qkv = T @ query_key_value(self.weights, layer) if layer > first + 1 else qkv
            z = heads_of(self.weights, qkv, self.moment)
            T = T + z @ _kept(self.weights, masked, layer).flatten(0, 1)
        return T

    def after_masked(
        self, layer: int, gone: Sequence[int]
    ) -> tuple[Float[Tensor, "batch d_token d_model"], Float[Tensor, "batch d_token columns"]]:
        """T after a layer some of whose heads are masked, and q, k, v of the next; before the last layer the map alone.

        The part of the masked heads is subtracted from both: it has few columns.
        """
        weights, is_last = self.weights, layer + 1 == self.weights.n_layers - 1
        written = weights.W_O[layer, gone].flatten(0, 1)
        if len(gone) == weights.n_heads:
            T = self.T[layer].expand(len(self.x_query), -1, -1)
            return T, T if is_last else T @ query_key_value(weights, layer + 1)
        z = _of_heads(self.z[layer].unflatten(-1, (weights.n_heads, -1)), gone)
        T = _less(self.T[layer + 1], z, written)
        if is_last:
            return T, T
        return T, _less(self.qkv[layer + 1], z, written @ query_key_value(weights, layer + 1))

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
        last, first = weights.n_layers - 1, min(masked)
        if first == last:
            return self._read_out(self._extended(run.T[last]), masked)
        T, qkv = run.after_masked(first, sorted(set(masked[first])))
        state = self._with_values(self._extended(T), first, masked[first])
        for layer in range(first + 1, last):
            W = query_key_value(weights, layer)
            if layer == first + 1:
                # The rows of the values are the same for all prompts.
                new = state.T[0, T.shape[1] :] @ W
                qkv = _with_rows(qkv, new)
            else:
                qkv = state.T @ W
            z = heads_of(weights, qkv, state.moment)
            state = replace(state, T=state.T + z @ _kept(weights, masked, layer).flatten(0, 1))
            state = self._with_values(state, layer, masked.get(layer, ()))
        return self._read_out(state, masked)

    def _extended(self, T: Tensor) -> "_Extended":
        """Tokens without further columns."""
        run = self.run
        at_query = pad(run.x_query, (0, run.weights.d_y))
        T = T.expand(len(self.prompts), -1, -1)
        return _Extended(T, (self.prompts.context_tokens,), at_query, run.moment)

    def _with_values(self, state: "_Extended", layer: int, masked: Collection[int]) -> "_Extended":
        """The state with the values of the masked heads of a layer as further columns."""
        if not (gone := sorted(set(masked))):
            return state
        weights = self.run.weights
        values = _of_heads(self.values[layer], gone).expand(len(self.prompts), -1, -1)
        written = weights.W_O[layer, gone].flatten(0, 1)
        factor = factor_on_scores(weights, self.prompts.x.shape[1])
        return state.with_values(values, written, factor)

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
    context: tuple[Float[Tensor, "batch pair _column"], ...]
    """Columns of the pairs, in parts."""
    at_query: Float[Tensor, "batch column"]
    moment: Float[Tensor, "batch column column"]
    """Second moment of the context, times the factor on the scores."""

    def with_values(
        self,
        values: Float[Tensor, "batch pos new"],
        written: Float[Tensor, "new d_model"],
        factor: float,
    ) -> "_Extended":
        """Tokens with values as further columns, which `written` maps to the stream."""
        new, before = values[:, :-1], self.moment.shape[1]
        across = factor * torch.cat([part.mT @ new for part in self.context], 1)
        n_columns = before + new.shape[2]
        moment = self.moment.new_empty(len(values), n_columns, n_columns)
        moment[:, :before, :before] = self.moment
        moment[:, :before, before:] = across
        moment[:, before:, :before] = across.mT
        moment[:, before:, before:] = factor * (new.mT @ new)
        return _Extended(
            _with_rows(self.T, written),
            (*self.context, new),
            torch.cat([self.at_query, values[:, -1]], 1),
            moment,
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
    moment = moment_of(weights, prompts)
    return LinearPass(
        weights, prompts.x_query, moment, *maps_of(weights, moment, weights.n_layers - 1)
    )


def maps_of(
    weights: Weights,
    moment: Float[Tensor, "batch d_token d_token"],
    n_layers: int,
    heads: Sequence[Head] = (),
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """T before each of the first layers and after the last of them, and z and qkv of each, as in `LinearPass`; `heads` are
    masked.

    The stream is tokens @ T, for the prompt's own tokens and for any other query token after the same context.
    """
    T, masked = [weights.reading[0][None]], by_layers(heads)
    z, qkv = list[Tensor](), list[Tensor]()
    for layer in range(n_layers):
        qkv.append(T[-1] @ query_key_value(weights, layer))
        z.append(heads_of(weights, qkv[-1], moment))
        T.append(T[-1] + z[-1] @ _kept(weights, masked, layer).flatten(0, 1))
    return T, z, qkv


def moment_of(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch d_token d_token"]:
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


def _of_heads(
    z: Float[Tensor, "batch row head d_head"], heads: Sequence[int]
) -> Float[Tensor, "batch row columns"]:
    """Columns of some heads, side by side."""
    if len(heads) == 1:
        return z[:, :, heads[0]]
    return z[:, :, list(heads)].flatten(2)


def _with_rows(
    above: Float[Tensor, "batch row column"], below: Float[Tensor, "new column"]
) -> Float[Tensor, "batch rows column"]:
    """Matrices with further rows, the same for all prompts; torch.cat of an expanded tensor takes longer."""
    n_rows = above.shape[1]
    rows = above.new_empty(len(above), n_rows + len(below), above.shape[2])
    rows[:, :n_rows], rows[:, n_rows:] = above, below
    return rows


def _less(
    minuend: Float[Tensor, "batch row column"],
    left: Float[Tensor, "batch row inner"],
    right: Float[Tensor, "inner column"],
) -> Float[Tensor, "batch row column"]:
    """minuend - left @ right, without an array for the product."""
    flat = torch.addmm(minuend.flatten(0, 1), left.flatten(0, 1), right, alpha=-1)
    return flat.view_as(minuend)


def query_key_value(weights: Weights, layer: int) -> Float[Tensor, "d_model columns"]:
    """W_Q, then W_K, then W_V of a layer, heads side by side."""
    stacked = torch.stack([weights.W_Q[layer], weights.W_K[layer], weights.W_V[layer]])
    return stacked.permute(2, 0, 1, 3).flatten(1)


def linear_heads(
    weights: Weights, layer: int, T: Tensor, moment: Tensor
) -> Float[Tensor, "batch d_token columns"]:
    """q_h (k_h^T M v_h) of all heads of a layer, side by side."""
    return heads_of(weights, T @ query_key_value(weights, layer), moment)


def heads_of(
    weights: Weights, qkv: Float[Tensor, "_batch d_token three_columns"], moment: Tensor
) -> Float[Tensor, "batch d_token columns"]:
    """q_h (k_h^T M v_h) of all heads side by side, from q, k and v."""
    q, k, v = qkv.chunk(3, dim=-1)
    heads = (weights.n_heads, weights.d_head)
    if weights.d_head * q.shape[-1] <= _NARROW:
        head = torch.arange(weights.n_heads, device=q.device).repeat_interleave(weights.d_head)
        own = head[:, None] == head
        return q @ (k.mT @ (moment @ v) * own)
    q, k, Mv = (part.unflatten(-1, heads).transpose(1, 2) for part in (q, k, moment @ v))
    return (q @ (k.mT @ Mv)).transpose(1, 2).flatten(2)
