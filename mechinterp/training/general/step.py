"""Loss of a model of any architecture and its gradient in the weights, in the fastest way that is known for it.

Stacks of linear attention run as a map of their tokens, other stacks of attention alone through the forward and backward
pass written out below (1.1 to 1.6 times as fast as autograd), everything else through autograd. Attention with
softmax, linear and relu/L scores is compiled (`kernel.py`) for float32 on the processor, in both of the last two ways.

In the passes written out the prompt is the last axis: the stream is [d_model, row, prompt], so that a product with weights
is one matrix product. Rows are tokens, the query last. The last layer computes the query only.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from mechinterp.config import ModelConfig
from mechinterp.config.model import LINEAR, NAMES
from mechinterp.icl.prompts import Prompts
from mechinterp.models.layers import is_normalised, pattern_and_slope
from mechinterp.models.run.attend import Keys, Queries, attend_by_patterns
from mechinterp.models.run.general import predict_deep, predictions_at_every
from mechinterp.models.weights import Weights
from mechinterp.training.batches import LANES, WHOLE

_Heads = Float[Tensor, "head feature row prompt"]
_KeyRows = Float[Tensor, "key_head feature key_row prompt"]
"""Keys or values of every head; a head axis of length 1 means that all heads share them."""


def loss_and_gradients(
    weights: Weights, prompts: Prompts, *, first_counted: int | None = None
) -> tuple[Tensor, Weights]:
    """Loss, in units of y^2, and its gradient in the weights.

    The loss is the mean over prompts and responses of (y_hat - y)^2, at the query or at every x.

    Args:
        first_counted: Least number of pairs before an x that counts; None: the query alone.
    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.models.constructions.stack import stack_of_layers
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> weights = stack_of_layers(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0)
        >>> loss, gradients = loss_and_gradients(weights, draw_prompts(TaskConfig(), 8))
        >>> gradients.W_Q.any()
        tensor(False)
    """
    if first_counted is None and weights.model.stack == "nonlinear":
        with torch.no_grad():
            forward = _Forward(weights, prompts)
            error = forward.prediction - prompts.y_query.T
            return error.square().mean(), forward.gradients(error * (2 / error.numel()))
    with torch.inference_mode(False), torch.enable_grad():
        leaves = {name: t.detach().requires_grad_() for name, t in weights.tensors.items()}
        of_leaves = weights.with_tensors(leaves)
        if first_counted is None:
            predicted = predict_deep(of_leaves, prompts, attend=attend_for_training)
            loss = (predicted - prompts.y_query).square().mean()
        else:
            loss = losses_at_every(of_leaves, prompts)[first_counted:].mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), weights.with_tensors(dict(zip(leaves, gradients, strict=True)))


@torch.no_grad()
def loss_of(weights: Weights, prompts: Prompts) -> Float[Tensor, ""]:
    """Loss at the query alone, in units of y^2."""
    if weights.model.stack == "nonlinear":
        predicted = _Forward(weights, prompts).prediction.T
    else:
        predicted = predict_deep(weights, prompts, attend=attend_for_training)
    return (predicted - prompts.y_query).square().mean()


def losses_at_every(weights: Weights, prompts: Prompts) -> Float[Tensor, " n_pairs"]:
    """Loss after 0 to L pairs, in units of y^2, from one pass over the prompts."""
    predicted = predictions_at_every(weights, prompts, attend=attend_for_training)
    return (predicted - prompts.y_of_every_x).square().mean((0, 2))


def attend_for_training(
    q: Queries,
    k: Keys,
    v: Keys,
    model: ModelConfig,
    rows: slice,
) -> Queries:
    """Weighted average of the values for each head and row, from scaled queries, keys and values; rows has the queries' positions.

    Example:
        >>> q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 4, 1, 2)
        >>> attend_for_training(q, k, k + 1, ModelConfig(context_only=True), slice(-1, None)).flatten()
        tensor([1., 1.])
    """
    if not (model.context_only and _is_compiled(model.score, q)):
        return attend_by_patterns(q, k, v, model, rows)
    n_keys = k.shape[1] - (not model.attend_to_self)
    attention = _Attention(model.score, model.score_slope, n_keys)
    return _Attended.apply(q, k, v, attention)


@dataclass(frozen=True, eq=False)
class _Read:
    """Queries, keys, values and attention weights of a layer, and the weighted averages z of its heads."""

    q: _Heads
    k: _KeyRows
    v: _KeyRows
    pattern: Tensor
    slope: Tensor | None
    """Factor of the gradient in the scores (`pattern_and_slope`); None if the kernel computes it."""
    z: _Heads


@dataclass(frozen=True, eq=False)
class _Attention:
    """Score function and number of readable rows, the same for every layer."""

    score: str
    slope: float
    n_keys: int
    """Number of readable rows; they are the first ones."""

    def forward(self, q: _Heads, k: _KeyRows, v: _KeyRows) -> _Read:
        """Attention weights and weighted averages of the heads."""
        if _is_compiled(self.score, q):
            _require_kernel()
            return self._by_kernel(q, k, v)
        scores = _rows(q) @ _rows(k, self.n_keys).mT
        pattern, slope = pattern_and_slope(scores, score=self.score, slope=self.slope)
        z = (pattern @ _rows(v, self.n_keys)).permute(0, 3, 2, 1)
        return _Read(q, k, v, pattern, slope, z.contiguous())

    def backward(self, of: _Read, d_z: _Heads, d_q: _Heads, d_k: _KeyRows, d_v: _KeyRows) -> None:
        """Set the gradients in queries, keys and values, from the gradient `d_z` in the weighted averages."""
        if _is_compiled(self.score, d_z):
            _require_kernel()
            self._back_by_kernel(of, d_z, d_q, d_k, d_v)
            return
        assert of.slope is not None
        d_read, n = _rows(d_z), self.n_keys
        d_score = d_read @ _rows(of.v, n).mT
        if is_normalised(self.score):
            d_score -= (of.pattern * d_score).sum(-1, keepdim=True)
        d_score *= of.slope
        d_q.copy_((d_score @ _rows(of.k, n)).permute(0, 3, 2, 1))
        _set_first(d_k, d_score.mT @ _rows(of.q))
        _set_first(d_v, of.pattern.mT @ d_read)

    def _by_kernel(self, q: _Heads, k: _KeyRows, v: _KeyRows) -> _Read:
        # Imported here, so that reading checkpoints does not load the compiler.
        from mechinterp.training.general.kernel import attend_blocks

        n_heads, _, n_rows, n_prompts = q.shape
        pattern = q.new_empty(n_prompts // LANES, n_heads, n_rows, self.n_keys * LANES)
        z = torch.empty_like(q)
        attend_blocks(*(t.numpy() for t in (q, k, v)), *self._kind, pattern.numpy(), z.numpy())
        return _Read(q, k, v, pattern, None, z)

    def _back_by_kernel(self, of: _Read, d_z: _Heads, *gradients: Tensor) -> None:
        from mechinterp.training.general.kernel import attend_blocks_back

        taken, pattern = (t.numpy() for t in (of.q, of.k, of.v)), of.pattern.numpy()
        attend_blocks_back(*taken, *self._kind, pattern, *(t.numpy() for t in (d_z, *gradients)))

    @property
    def _kind(self) -> tuple[int, int, float]:
        """Arguments of the kernel: number of keys, score function, factor on the scores."""
        from mechinterp.training.general.kernel import SCORE_KINDS

        kind = "linear" if self.score in LINEAR else self.score
        factor = 1.0 if kind == "softmax" else self.slope
        if self.score.endswith("/L"):
            factor /= self.n_keys
        return self.n_keys, SCORE_KINDS.index(kind), factor


class _Forward:
    """One forward pass, with `gradients` for the backward pass."""

    def __init__(self, weights: Weights, prompts: Prompts):
        self.weights, self.n_prompts = weights, len(prompts)
        model, length = weights.model, prompts.x.shape[1]
        # Zero prompts fill the last block of lanes.
        fill = (0, -len(prompts) % _block_of(model.score, prompts.x))
        self.tokens = pad(prompts.tokens.permute(2, 1, 0), fill).contiguous()
        self.attention = _Attention(model.score, model.score_slope, length)
        self.W_in, self.W_U = weights.reading
        parts = (weights.scale * weights.W_Q, weights.W_K, weights.W_V)
        self.wide = torch.stack(parts, dim=1).mT.flatten(1, 3)  # [layer, columns, d_model]
        self.W_O = weights.W_O.flatten(1, 2)  # [layer, columns, d_model]
        self.streams = [_product(self.W_in.mT, self.tokens)]
        self.attended: list[_Read] = []
        for layer in range(weights.n_layers - 1):
            self._layer(layer)
        self._last_layer()

    def _layer(self, layer: int) -> None:
        weights, stream, wide = self.weights, self.streams[-1], self.wide[layer]
        # Before the first layer the stream has only as many dimensions as a token.
        projected = _product(wide, stream) if layer else _product(wide @ self.W_in.mT, self.tokens)
        q, k, v = projected.view(3, weights.n_heads, weights.d_head, *stream.shape[1:])
        self.attended.append(self.attention.forward(q, k, v))
        z = self.attended[-1].z.flatten(0, 1)
        self.streams.append(_product(self.W_O[layer].mT, z, add_to=stream))

    def _last_layer(self) -> None:
        weights, stream = self.weights, self.streams[-1]
        self.at_query = stream[:, -1].contiguous()  # [d_model, prompt]
        self.W_Q = self.wide[-1, : len(self.wide[-1]) // 3]  # [columns, d_model], with the scale
        self.q = (self.W_Q @ self.at_query).unflatten(0, (weights.n_heads, -1))
        # Key-side vectors: the direction in the stream that each head scores.
        key_side = (weights.W_K[-1] @ self.q)[:, :, None]
        self.attended.append(self.attention.forward(key_side, stream[None], stream[None]))
        self.out = (self.W_O[-1] @ self.W_U).view(weights.n_heads, -1, weights.d_y)
        self.written = (weights.W_V[-1] @ self.out).flatten(0, 1)
        read = self.attended[-1].z.flatten(0, 2)
        prediction = self.W_U.mT @ self.at_query + self.written.mT @ read
        self.prediction = prediction[:, : self.n_prompts]  # [d_y, prompt]

    def gradients(self, d_prediction: Float[Tensor, "d_y prompt"]) -> Weights:
        """Gradient in the weights, from the gradient in the predictions."""
        weights = self.weights
        d_prediction = pad(d_prediction, (0, self.tokens.shape[-1] - self.n_prompts))
        d_wide = self.wide.new_empty(weights.n_layers, 3, *weights.W_V.mT.shape[1:])
        d_W_O, d_W_in = torch.empty_like(weights.W_O), torch.zeros_like(self.W_in)
        d_stream, d_W_U = self._last_layer_back(d_prediction, d_wide[-1], d_W_O[-1])
        for layer in reversed(range(weights.n_layers - 1)):
            torch.mm(self._written(layer), d_stream.flatten(1).mT, out=d_W_O[layer].flatten(0, 1))
            d_start = self._layer_back(layer, d_stream)
            if layer == 0:
                d_W_in += d_start.mT @ self.wide[0]
                d_start = d_start @ self.W_in
            d_wide[layer] = d_start.view_as(d_wide[layer])
        d_W_in += _outer(self.tokens, d_stream)
        d_W_Q, d_W_K, d_W_V = d_wide.mT.unbind(1)
        layers = zip(NAMES, (weights.scale * d_W_Q, d_W_K, d_W_V, d_W_O), strict=True)
        gradients = {f"attn.{name}": gradient for name, gradient in layers}
        gradients |= {"W_in": d_W_in, "unembed.W_U": d_W_U}
        return weights.with_tensors({name: gradients[name] for name in weights.tensors})

    def _written(self, layer: int) -> Float[Tensor, "columns position"]:
        """Weighted averages of a layer's heads, with all heads' features along one axis."""
        return self.attended[layer].z.flatten(0, 1).flatten(1)

    def _last_layer_back(
        self, d_prediction: Tensor, d_wide: Tensor, d_W_O: Tensor
    ) -> tuple[Float[Tensor, "d_model row prompt"], Float[Tensor, "d_model d_y"]]:
        """Set the gradients in the last layer; returns the gradients in the stream before it and in the read-out."""
        weights, of = self.weights, self.attended[-1]
        d_written = (of.z.flatten(0, 2) @ d_prediction.mT).view(weights.n_heads, -1, weights.d_y)
        d_out = (weights.W_V[-1].mT @ d_written).flatten(0, 1)
        d_W_O.copy_((d_out @ self.W_U.mT).view_as(d_W_O))
        d_W_U = self.at_query @ d_prediction.mT + self.W_O[-1].mT @ d_out
        d_key_side, d_k, d_v = (torch.empty_like(t) for t in (of.q, of.v, of.v))
        d_z = (self.written @ d_prediction).view_as(of.z)
        self.attention.backward(of, d_z, d_key_side, d_k, d_v)
        d_keys = d_key_side[:, :, 0]
        d_q = (weights.W_K[-1].mT @ d_keys).flatten(0, 1)
        d_wide[0] = (d_q @ self.at_query.mT).view_as(d_wide[0])
        d_wide[1], d_wide[2] = self.q @ d_keys.mT, self.out @ d_written.mT
        d_at_query = self.W_U @ d_prediction + self.W_Q.mT @ d_q
        d_stream = d_k.add_(d_v)[0]
        d_stream[:, -1] += d_at_query
        return d_stream, d_W_U

    def _layer_back(self, layer: int, d_stream: Tensor) -> Tensor:
        """Change the gradient in the stream after a layer, in place, to the gradient in the stream before it.

        Returns:
            Gradient in `wide`. For the first layer it is the gradient in the product of `wide` and W_in, and the stream's
            gradient then lacks the part that passes through `wide`.
        """
        of = self.attended[layer]
        d_projected = torch.empty(3, *of.q.shape, dtype=of.q.dtype, device=of.q.device)
        self.attention.backward(of, _product(self.W_O[layer], d_stream).view_as(of.z), *d_projected)
        flat = d_projected.flatten(0, 2)
        if layer == 0:
            return _outer(flat, self.tokens)
        d_wide = _outer(flat, self.streams[layer])
        d_stream.view(len(d_stream), -1).addmm_(self.wide[layer].mT, flat.flatten(1))
        return d_wide


class _Attended(torch.autograd.Function):
    """Compiled attention with compiled gradients in queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: _Attention) -> Tensor:
        ctx.attention, ctx.n_prompts = attention, len(q)
        ctx.read = attention.forward(*(_prompts_last(each, attention) for each in (q, k, v)))
        return _prompts_first(ctx.read.z, ctx.n_prompts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_z: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.empty_like(each) for each in (ctx.read.q, ctx.read.k, ctx.read.v)]
        ctx.attention.backward(ctx.read, _prompts_last(d_z, ctx.attention), *gradients)
        return *(_prompts_first(each, ctx.n_prompts) for each in gradients), None


def _prompts_last(heads: Tensor, attention: _Attention) -> Tensor:
    """[head, feature, row, prompt], padded with zero prompts to whole blocks of the kernel."""
    fill = -len(heads) % _block_of(attention.score, heads)
    return pad(heads.permute(2, 3, 1, 0), (0, fill)).contiguous()


def _prompts_first(heads: Tensor, n_prompts: int) -> Tensor:
    return heads[..., :n_prompts].permute(3, 2, 0, 1)


@cache
def _require_kernel() -> None:
    """Compare the compiled attention, which may come from a folder of the disk, with the tensor operations.

    Raises:
        ValueError: If they differ.
    """
    from mechinterp.training.general.kernel import SCORE_KINDS
    from mechinterp.training.lanes import require_close

    generator, shape = torch.Generator("cpu").manual_seed(0), (4, 2, 3, 4, LANES)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    (q, k, v, d_z), exact = numbers, numbers.double()
    for kind in SCORE_KINDS:
        attention = _Attention(kind, 0.5, 3)
        found, of = torch.empty_like(numbers[:3]), attention._by_kernel(q, k, v)
        attention._back_by_kernel(of, d_z, *found)
        expected, by_tensors = torch.empty_like(exact[:3]), attention.forward(*exact[:3])
        attention.backward(by_tensors, exact[3], *expected)
        require_close(f"{kind} attention", (of.z, *found), (by_tensors.z, *expected))


def _is_compiled(score: str, like: Tensor) -> bool:
    """True if the kernel computes these scores for tensors of this dtype and device."""
    known = score in (*LINEAR, "relu/L", "softmax")
    return known and like.device.type == "cpu" and like.dtype == torch.float32


def _block_of(score: str, like: Tensor) -> int:
    """Number of prompts in a block; the number of prompts is padded to a multiple of it."""
    return WHOLE if _is_compiled(score, like) else 1


def _product(left: Tensor, right: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """Product of a matrix with the features of [feature, row, prompt]."""
    product = left @ right.flatten(1)
    if add_to is not None:
        product += add_to.flatten(1)
    return product.view(-1, *right.shape[1:])


def _outer(left: Tensor, right: Tensor) -> Float[Tensor, "left right"]:
    """Sum over rows and prompts of the outer products of features."""
    return left.flatten(1) @ right.flatten(1).mT


def _rows(
    heads: Float[Tensor, "head feature row prompt"], n: int | None = None
) -> Float[Tensor, "head prompt _first feature"]:
    """First `n` rows, as [head, prompt, row, feature]."""
    return heads.permute(0, 3, 2, 1)[:, :, :n]


def _set_first(gradient: _KeyRows, rows: Float[Tensor, "head prompt first feature"]) -> None:
    """Set the gradient of the first rows, summed over heads if they share keys; set all other rows to 0."""
    part = rows.permute(0, 3, 2, 1)
    if len(gradient) < len(part):
        part = part.sum(0, keepdim=True)
    gradient.zero_()[:, :, : part.shape[2]] = part
