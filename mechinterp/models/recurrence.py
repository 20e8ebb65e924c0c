"""Formulas of recurrent layers: each head writes the tokens into a state S, one after the other, and queries read it.

A query reads z = scale q S. With gate g, strength beta, key k and value v of token t the state is
    "gated"        S_t = g_t S_{t-1} + k_t v_t^T                                (gated linear attention)
    "delta"        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T            (delta rule)
    "gated_delta"  S_t = g_t S_{t-1} + beta_t k_t (v_t - g_t S_{t-1}^T k_t)^T    (gated delta rule)
    "mesa"         S_t = (H_t + ridge)^-1 G_t,  H_t = g_t H_{t-1} + beta_t k_t k_t^T,  G_t = g_t G_{t-1} + beta_t k_t v_t^T
All tokens are computed at once: D_ts, the product of the gates after token s up to token t, is what is left of s at t, and
the delta rules solve one triangular system. Every rule is linear in the values, so z = A v with an attention pattern A.

Sources: Yang et al. 2024 (arXiv 2312.06635, 2406.06484, 2412.06464), von Oswald et al. 2025 (arXiv 2506.05233).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, softplus

from mechinterp.config import ModelConfig

SMALLEST_GATE = 1e-30
"""Gates below this count as it, so that a gate of 0 has a logarithm."""
LARGEST_LOGIT = 40.0
"""Logit of a gate of 1, which is exactly 1 in float64."""

Tokens = Float[Tensor, "batch key head"]


@dataclass(frozen=True, eq=False)
class Memory:
    """Keys, values and gates by which the tokens of each prompt change the states of a layer's heads."""

    rule: str
    """Score of the model: "gated", "delta", "gated_delta" or "mesa"."""
    k: Float[Tensor, "batch key head d_head"]
    v: Float[Tensor, "batch key head d_value"]
    gate: Float[Tensor, "one_or_batch key head *d_head"] | None
    """Factor that is left of the state when the token is written, in (0, 1]; None: 1. With a last axis each coordinate of the
    keys has its own, "gated" only."""
    beta: Float[Tensor, "one_or_batch key head"] | None
    """Strength with which the token is written, in (0, 1); None: 1."""
    ridge: Float[Tensor, "head d_head"] | None
    """Penalty on each coordinate of the keys; "mesa" only."""

    def read(
        self, q: Float[Tensor, "batch row head d_head"], n_written: range
    ) -> Float[Tensor, "batch row head d_value"]:
        """Outputs z of scaled queries, each of which reads the state after this number of tokens.

        Example:
            >>> k = torch.tensor([[1.0], [2.0]])[None, :, None]
            >>> memory = Memory("gated", k, k, torch.full((1, 2, 1), 0.5), None, None)
            >>> memory.read(k, range(1, 3)).flatten()
            tensor([1., 9.])
        """
        left = self._left(n_written)
        if left.ndim == 5:
            weights = torch.einsum("brhd,bkhd,bhrkd->bhrk", q, self.k, left)
        else:
            weights = left * (self._asked(q, left).transpose(1, 2) @ self._keys.mT)
        return (weights @ self._written).transpose(1, 2)

    def pattern(
        self, q: Float[Tensor, "batch row head d_head"], n_written: range
    ) -> Float[Tensor, "batch head row key"]:
        """Attention pattern A with z = A v: the outputs for values that are 1 at one token and 0 at all others."""
        one_hot = torch.eye(self.k.shape[1], dtype=q.dtype, device=q.device)
        values = one_hot[None, :, None].expand(len(self.k), -1, self.k.shape[2], -1)
        return replace(self, v=values).read(q, n_written).transpose(1, 2)

    def states(self, n_written: range) -> Float[Tensor, "batch row head d_head d_value"]:
        """States after these numbers of tokens, from zero states."""
        left = self._left(n_written)
        channel = "d" if left.ndim == 5 else ""
        states = torch.einsum(f"bhrk{channel},bkhd,bhkv->brhdv", left, self.k, self._written)
        return states if self.rule != "mesa" else torch.linalg.solve(self._gram(left), states)

    def steps(self) -> Float[Tensor, "batch key head d_head d_head"]:
        """Matrices M_t by which a change of the state before a token passes to the state after it."""
        identity = torch.eye(self.k.shape[-1], dtype=self.k.dtype, device=self.k.device)
        if self.gate is not None and self.gate.ndim == 4:
            return torch.diag_embed(self.gate.expand(self.k.shape))
        kept = self.k.new_ones(()) if self.gate is None else self.gate[..., None, None]
        if self.rule == "mesa":
            gram = self._gram(self._left(range(self.k.shape[1] + 1)))
            return kept * torch.linalg.solve(gram[:, 1:], gram[:, :-1])
        if self.rule == "gated":
            return (kept * identity).expand(*self.k.shape, -1)
        assert self.beta is not None
        erased = self.beta[..., None, None] * self.k[..., :, None] * self.k[..., None, :]
        return kept * (identity - erased)

    def _asked(self, q: Tensor, left: Tensor) -> Float[Tensor, "batch row head d_head"]:
        """Vectors whose products with the keys are the weights of what was written."""
        if self.rule != "mesa":
            return q
        return torch.linalg.solve(self._gram(left), q[..., None])[..., 0]

    def _gram(self, left: Tensor) -> Float[Tensor, "batch row head d_head d_head"]:
        """H + ridge after the tokens that `left` weighs."""
        assert self.beta is not None
        assert self.ridge is not None
        weighted = left * self.beta.transpose(1, 2)[:, :, None]
        products = (self.k[..., :, None] * self.k[..., None, :]).permute(0, 2, 1, 3, 4).flatten(3)
        gram = (weighted @ products).unflatten(3, (self.k.shape[-1], -1)).transpose(1, 2)
        return gram + torch.diag_embed(self.ridge)

    @cached_property
    def _written(self) -> Float[Tensor, "batch head key d_value"]:
        """Value that each token adds to the state in the direction of its key: v, or the part of it that is new."""
        v = self.v.transpose(1, 2)
        if self.beta is None:
            return v
        beta = self.beta.transpose(1, 2)[..., None]
        if self.rule == "mesa":
            return beta * v
        k = self._keys
        # Only the part below the diagonal is read, and the diagonal counts as 1.
        seen = beta * self._kept * (k @ k.mT)
        return torch.linalg.solve_triangular(seen, beta * v, upper=False, unitriangular=True)

    @cached_property
    def _keys(self) -> Float[Tensor, "batch head key d_head"]:
        return self.k.transpose(1, 2)

    @cached_property
    def _kept(self) -> Float[Tensor, "one_or_batch head after key *d_head"]:
        """D_ts: the part of what token s wrote that is left after token t, of each coordinate if gates have an axis for them;
        0 for later tokens."""
        n_keys = self.k.shape[1]
        if self.gate is None:
            ones = torch.ones(n_keys, n_keys, dtype=self.k.dtype, device=self.k.device)
            return ones.tril()[None, None]
        total = self.gate.clamp_min(SMALLEST_GATE).log().cumsum(1).transpose(1, 2)
        between = total[:, :, :, None] - total[:, :, None]
        later = torch.ones(n_keys, n_keys, dtype=torch.bool, device=between.device).triu(1)
        later = later if between.ndim == 4 else later[..., None]
        return between.masked_fill(later, -torch.inf).exp()

    def _left(self, n_written: range) -> Float[Tensor, "one_or_batch head row key *d_head"]:
        """D of the last written token, for each row; zeros where none is written."""
        rows, kept = slice(n_written.start, n_written.stop, n_written.step), self._kept
        return pad(kept, (0, 0) * (kept.ndim - 3) + (1, 0))[:, :, rows]


def gates_of(
    read: Float[Tensor, "batch pos d_model"], tensors: Mapping[str, Tensor], name: str
) -> Float[Tensor, "one_or_batch pos head"] | None:
    """Gates or strengths of writing at each token, sigmoid(read W + b); None if the layer has none.

    Args:
        read: What the keys of the layer are made of; [batch, pos, head, d_model] if each head reads its own.
        tensors: Tensors of the layer by name, such as W_gate [head, d_model] and b_gate [head].
        name: "gate" or "beta".
    """
    b, W = tensors.get(f"b_{name}"), tensors.get(f"W_{name}")
    if b is None:
        return None
    if W is None:
        return torch.sigmoid(b).expand(1, read.shape[1], -1)
    product = (read * W).sum(-1) if read.ndim == 4 else read @ W.mT
    return torch.sigmoid(product + b)


def memory_of(
    rule: str,
    k: Float[Tensor, "batch key head d_head"],
    v: Float[Tensor, "batch key head d_value"],
    read: Float[Tensor, "batch key d_model"],
    tensors: Mapping[str, Tensor],
) -> Memory:
    """Memory of a layer, from its keys, values, what the keys are made of, and its tensors by name."""
    ridge = softplus(tensors["b_ridge"]) if "b_ridge" in tensors else None
    gate, beta = (gates_of(read, tensors, name) for name in ("gate", "beta"))
    return Memory(rule, k, v, gate, beta, ridge)


def written_before(n_pos: int, model: ModelConfig) -> range:
    """Numbers of tokens in the states that the positions read: those before it, plus itself with attend_to_self.

    Example:
        >>> written_before(3, ModelConfig(score="delta"))
        range(0, 3)
    """
    return range(int(model.attend_to_self), n_pos + int(model.attend_to_self))
