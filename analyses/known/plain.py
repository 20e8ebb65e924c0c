"""A second program for the truths: the forward pass of a model in numpy, node by node, in float64.

Nothing here is shared with the hooked models. Recurrent layers run token by token, by their definition.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import erf

from mechinterp.models.weights import Weights

Array = np.ndarray
Change = Callable[[str, Array], Array]
"""Function of the name of a node and of what it reads or writes, which it may change; axes [..., prompt, pos, d_model]."""


def unchanged(name: str, values: Array) -> Array:
    return values


class Plain:
    """A model as a graph: what a node reads is the sum of what earlier nodes write."""

    def __init__(self, weights: Weights) -> None:
        self.model, self.scale = weights.model, weights.scale
        self.tensors = {name: t.double().numpy(force=True) for name, t in weights.tensors.items()}
        self.W_in, self.W_U = (each.double().numpy(force=True) for each in weights.reading)
        assert self.model.rotary_dim is None
        assert self.model.norm != "after"

    def run(
        self, tokens: Array, read: Change = unchanged, write: Change = unchanged
    ) -> tuple[Array, dict[str, Array]]:
        """Prediction at the query, [..., prompt, d_y], and what each node writes."""
        written: dict[str, Array] = {}

        def node(name: str, output: Array) -> Array:
            written[name] = write(name, output)
            return written[name]

        stream = node("input", self._embedded(tokens))
        for layer in range(self.model.n_layers):
            own = {
                name.split(".", 1)[1]: tensor[layer]
                for name, tensor in self.tensors.items()
                if name.startswith(("attn.", "mlp.", "ln1.", "ln2."))
            }
            norms = {
                n: (self.tensors[f"{n}.w"][layer], self.tensors[f"{n}.b"][layer])
                for n in ("ln1", "ln2")
                if f"{n}.w" in self.tensors
            }
            after = stream + own.get("b_O", 0.0)
            for head in range(self.model.n_heads):
                name = f"L{layer}H{head}"
                inputs = [
                    self._normed(read(f"{name}.{part}", stream), norms.get("ln1"))
                    for part in ("q", "k", "v")
                ]
                after = after + node(name, self._averages(own, head, *inputs) @ own["W_O"][head])
            stream = after
            if self.model.d_mlp is not None:
                name = f"L{layer}MLP"
                mlp_in = self._normed(read(name, stream), norms.get("ln2"))
                stream = stream + node(name, self._mlp(layer, mlp_in))
        last = read("output", stream)
        if self.model.final_norm:
            last = self._normed(last, (self.tensors["ln_final.w"], self.tensors["ln_final.b"]))
        return (last @ self.W_U + self.tensors.get("unembed.b_U", 0.0))[..., -1, :], written

    def _embedded(self, tokens: Array) -> Array:
        if "W_read" in self.tensors:
            tokens = self._activated(
                tokens @ self.tensors["W_read"] + self.tensors.get("b_read", 0.0)
            )
        stream = tokens @ self.W_in + self.tensors.get("b_in", 0.0)
        if "pos_embed.W_pos" in self.tensors:
            stream = stream + self.tensors["pos_embed.W_pos"][: stream.shape[-2]]
        return stream

    def _normed(self, stream: Array, norm: tuple[Array, Array] | None) -> Array:
        if norm is None:
            return stream
        centred = stream if self.model.rms_norm else stream - stream.mean(-1, keepdims=True)
        size = np.sqrt((centred**2).mean(-1, keepdims=True) + self.model.norm_eps)
        return centred / size * norm[0] + norm[1]

    def _mlp(self, layer: int, mlp_in: Array) -> Array:
        of = {name: self.tensors[f"mlp.{name}"][layer] for name in ("W_in", "W_out")}
        b_in, b_out = (
            self.tensors[f"mlp.{name}"][layer] if self.model.biases else 0.0
            for name in ("b_in", "b_out")
        )
        return self._activated(mlp_in @ of["W_in"] + b_in) @ of["W_out"] + b_out

    def _activated(self, x: Array) -> Array:
        kind = self.model.activation
        if kind == "relu":
            return np.maximum(x, 0)
        if kind == "gelu":
            return x * (1 + erf(x / math.sqrt(2))) / 2
        if kind == "gelu_new":
            return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        return np.tanh(x) if kind == "tanh" else x / (1 + np.exp(-x))

    def _averages(
        self, own: dict[str, Any], head: int, for_q: Array, for_k: Array, for_v: Array
    ) -> Array:
        """z of a head from what its query, key and value read."""
        biases = {part: own[f"b_{part}"][head] if self.model.biases else 0.0 for part in "QKV"}
        if self.model.merged_qk:
            q, k = for_q @ own["W_QK"][head], for_k
        else:
            q, k = for_q @ own["W_Q"][head], for_k @ own["W_K"][head]
        q, k, v = q + biases["Q"], k + biases["K"], for_v @ own["W_V"][head] + biases["V"]
        if self.model.recurrent:
            return self._recurrent(own, head, self.scale * q, k, v, for_k)
        scores = self.scale * (q @ np.swapaxes(k, -1, -2))
        return self._pattern(scores) @ v

    def _pattern(self, scores: Array) -> Array:
        n, model = scores.shape[-1], self.model
        reads = np.ones((n, n), dtype=bool)
        if not model.context_only:
            reads = np.tril(reads, 0 if model.attend_to_self else -1)
        elif not model.attend_to_self:
            reads[:, -1] = False
        n_keys, slope = np.maximum(reads.sum(1, keepdims=True), 1), model.score_slope
        linear = np.where(reads, slope * scores, 0.0)
        if model.score == "linear":
            return linear
        if model.score == "linear/L":
            return linear / n_keys
        if model.score == "linear/pairs":
            return linear / (n - 1)
        if model.score == "relu/L":
            return np.maximum(linear, 0.0) / n_keys
        if model.score == "softmax":
            shifted = np.where(reads, scores, -np.inf)
            peak = shifted.max(-1, keepdims=True)
            values = np.exp(shifted - np.where(np.isfinite(peak), peak, 0.0))
        else:
            affine = {"1+tanh": 1 + np.tanh(scores), "1+Cx": 1 + slope * scores}
            values = affine.get(model.score, (1 + slope * scores) ** 2)
        values = np.where(reads, values, 0.0)
        total = values.sum(-1, keepdims=True)
        return values / np.where(total == 0, 1.0, total)

    def _recurrent(
        self, own: dict[str, Any], head: int, q: Array, k: Array, v: Array, for_k: Array
    ) -> Array:
        """Outputs of a recurrent head: the state is read before the token is written."""
        gate, beta = (self._strength(own, head, name, for_k) for name in ("gate", "beta"))
        rule, width = self.model.score, k.shape[-1]
        axes = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        S = np.zeros((*axes, width, v.shape[-1]))
        H = np.zeros((*axes, width, width))
        ridge = np.diag(np.log1p(np.exp(own["b_ridge"][head]))) if rule == "mesa" else 0.0
        outputs = []
        for t in range(k.shape[-2]):
            if self.model.attend_to_self:
                S, H = self._written(S, H, k[..., t, :], v[..., t, :], gate[..., t], beta[..., t])
            state = np.linalg.solve(H + ridge, S) if rule == "mesa" else S
            outputs.append((q[..., t, None, :] @ state)[..., 0, :])
            if not self.model.attend_to_self:
                S, H = self._written(S, H, k[..., t, :], v[..., t, :], gate[..., t], beta[..., t])
        return np.stack(outputs, -2)

    def _strength(self, own: dict[str, Any], head: int, name: str, for_k: Array) -> Array:
        if f"b_{name}" not in own:
            return np.ones(for_k.shape[:-1])
        logit = own[f"b_{name}"][head] + (
            for_k @ own[f"W_{name}"][head] if f"W_{name}" in own else np.zeros(for_k.shape[:-1])
        )
        return 1 / (1 + np.exp(-logit))

    def _written(
        self, S: Array, H: Array, k: Array, v: Array, gate: Array, beta: Array
    ) -> tuple[Array, Array]:
        """State (for "mesa" G and H) after a token."""
        gate, beta = gate[..., None, None], beta[..., None, None]
        S = gate * S
        if self.model.score == "mesa":
            square = k[..., :, None] * k[..., None, :]
            return S + beta * k[..., :, None] * v[..., None, :], gate * H + beta * square
        new = v if self.model.score == "gated" else v - (k[..., None, :] @ S)[..., 0, :]
        return S + beta * k[..., :, None] * new[..., None, :], H
