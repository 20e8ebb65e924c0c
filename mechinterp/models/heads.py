"""One-layer attention as functions of its weights, computed at the query only.

The heads of many independent models share one axis, so that a thousand models cost one set of tensor operations.
With A = W_Q W_K^T (scale included) and v = W_V W_O, the output of a head is

    out = sum_l p_l (x_l, y_l) v,   p = softmax_l( x_query A[:d_x] (x_l, y_l)^T ),

because the query's y slot is 0 and, unless `attend_to_self` is set, the query does not attend to itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config.model import BIASES, NAMES
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import chunks, one_layer_bytes, require_memory, together
from mechinterp.models.layers import pattern_and_slope


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Weights of the heads of one attention layer, or of several independent layers along the head axis."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_y"]
    """The y columns of TransformerLens' W_O; its x columns are zero."""
    scale: float
    """Factor on the scores, by default 1/sqrt(d_head)."""
    score: str = "softmax"
    score_slope: float = 1.0
    attend_to_self: bool = False
    """True: the query's own token (x_query, 0) is among the keys."""
    b_Q: Float[Tensor, "head d_head"] | None = None  # noqa: N815
    """Biases: all four are given, or all are None."""
    b_K: Float[Tensor, "head d_head"] | None = None  # noqa: N815
    b_V: Float[Tensor, "head d_head"] | None = None  # noqa: N815
    b_O: Float[Tensor, " d_y"] | None = None  # noqa: N815
    """The y entries of TransformerLens' b_O. It has no head axis and is added to the prediction."""
    merged_qk: bool = False
    """True: each head has one matrix W_QK, stored as W_Q, and W_K is the identity."""

    def __post_init__(self) -> None:
        if self.merged_qk and self.W_K.shape[1] != self.W_K.shape[2]:
            raise ValueError(
                f"d_head must be d_model = {self.W_K.shape[1]} in merged heads, got {self.W_K.shape[2]}."
            )

    @property
    def architecture(self) -> tuple[object, ...]:
        """All settings except the numbers; models of equal architecture can share one head axis."""
        settings = (self.scale, self.score, self.score_slope, self.attend_to_self, self.merged_qk)
        return (tuple(self.W_Q.shape[1:]), self.d_y, *settings, self.b_Q is not None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights, and biases if there are any, by name."""
        named = {name: getattr(self, name) for name in (*NAMES, *BIASES)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def n_heads(self) -> int:
        return self.W_Q.shape[0]

    @property
    def d_y(self) -> int:
        return self.W_O.shape[2]

    @property
    def d_x(self) -> int:
        return self.W_Q.shape[1] - self.d_y

    @property
    def QK(self) -> Float[Tensor, "head d_model d_model"]:
        """scale * W_Q W_K^T, [query coordinate, key coordinate]. The papers' KQ is its transpose."""
        n_heads, width = self.W_Q.shape[:2]
        needed = 2 * n_heads * width**2 * self.W_Q.element_size()
        require_memory(needed, f"QK circuits of {n_heads} heads of width {width}")
        return self.scale * self.W_Q @ self.W_K.mT

    @property
    def OV(self) -> Float[Tensor, "head d_model d_y"]:
        """W_V W_O, [token coordinate, response]."""
        return self.W_V @ self.W_O

    @property
    def omega(self) -> Float[Tensor, "head d_x"]:
        """Diagonal of each QK circuit's x block, unit 1/x^2."""
        return self.QK[:, : self.d_x, : self.d_x].diagonal(dim1=1, dim2=2)

    @property
    def mu(self) -> Float[Tensor, "head d_y"]:
        """Diagonal of each OV circuit's y block: the weight of y_n in prediction n."""
        return self.OV[:, self.d_x :].diagonal(dim1=1, dim2=2)

    @property
    def qk_diagonal(self) -> Float[Tensor, " head"]:
        """Norm of the diagonal of the QK x block divided by the norm of the whole block; 1 for a diagonal block."""
        block = self.QK[:, : self.d_x, : self.d_x]
        return _share(self.omega.norm(dim=1), block.flatten(1).norm(dim=1))

    @property
    def ov_last_entry(self) -> Float[Tensor, " head"]:
        """Norm of mu divided by the norm of the whole OV circuit; 1 if only y_n contributes to prediction n."""
        return _share(self.mu.norm(dim=1), self.OV.flatten(1).norm(dim=1))

    def __getitem__(self, heads: slice) -> "AttentionWeights":
        return self.with_tensors(
            {name: tensor[heads] for name, tensor in self.tensors.items() if name != "b_O"}
        )

    def to(self, target: torch.device | str | torch.dtype) -> "AttentionWeights":
        """The same weights on another device or in another dtype."""
        return self.with_tensors({name: t.to(target) for name, t in self.tensors.items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "AttentionWeights":
        """Copy with these tensors replaced."""
        return replace(self, **tensors)  # type: ignore[arg-type]


def stack(models: Sequence[AttentionWeights]) -> AttentionWeights:
    """Heads of several models without biases, along one axis.

    Raises:
        ValueError: If the models differ in head shape, scale or score, or have biases.
    """
    kinds = {model.architecture for model in models}
    if len(kinds) != 1:
        raise ValueError(
            f"Stacked models must share head shape, scale and score, got {len(kinds)} kinds."
        )
    if models[0].b_O is not None:
        raise ValueError("Stacked models must have no biases, got some that have.")
    if len(models) == 1:
        return models[0]
    return models[0].with_tensors(
        {name: torch.cat([getattr(model, name) for model in models]) for name in NAMES}
    )


def identity_keys(
    W_QK: Float[Tensor, "*heads d_model d_model"],
) -> Float[Tensor, "*heads d_model d_model"]:
    """W_K of merged heads: one identity matrix per head."""
    identity = torch.eye(W_QK.shape[-1], dtype=W_QK.dtype, device=W_QK.device)
    return identity.repeat(*W_QK.shape[:-2], 1, 1)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole; 0 for a head whose circuit is zero."""
    return part / whole.masked_fill(whole == 0, 1)


def attend(
    weights: AttentionWeights,
    context: Float[Tensor, "batch context d_model"],
    x_query: Float[Tensor, "batch d_x"],
) -> tuple[
    Float[Tensor, "batch context head"],
    Float[Tensor, "batch context head"],
    Float[Tensor, "batch d_model head"],
]:
    """Attention at the query: pattern, factor of its gradient, and weighted average of the context tokens, per head."""
    batch, d_x = x_query.shape
    d_model = context.shape[-1]
    query_key = weights.QK[:, :d_x].permute(1, 2, 0).reshape(d_x, -1)
    key_side = (x_query @ query_key).view(batch, d_model, -1)
    scores = context @ key_side
    if weights.b_Q is not None and weights.b_K is not None:
        # Bias terms of the scores: b_Q W_K^T per key token, and q b_K per query.
        by_key = torch.einsum("he,hme->mh", weights.b_Q, weights.W_K)
        query = torch.einsum("bm,hme->bhe", x_query, weights.W_Q[:, :d_x]) + weights.b_Q
        by_query = weights.scale * (query * weights.b_K).sum(-1)
        scores = scores + context @ (weights.scale * by_key) + by_query[:, None]
    pattern, slope = pattern_and_slope(
        scores, score=weights.score, slope=weights.score_slope, dim=1
    )
    return pattern, slope, context.mT @ pattern


def head_outputs(weights: AttentionWeights, prompts: Prompts) -> Float[Tensor, "batch head d_y"]:
    """Output of each head, its share of the prediction, in units of y.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (2.3): softmax over the context tokens only.
    Example:
        >>> from mechinterp.models.constructions.one_layer import kernel_head
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> generator = generator_for(0, "eval", 0)
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator, dtype=torch.float64)
        >>> tuple(head_outputs(kernel_head(omega=0.5, mu=1.5, d_x=5), prompts).shape)
        (8, 1, 1)
    """
    n_heads, d_model, _ = weights.W_V.shape
    length = prompts.x.shape[1]
    sizes = {"n_tokens": length + 1, "width": weights.W_V.element_size()}
    per_prompt = one_layer_bytes(n_heads=n_heads, d_model=d_model, **sizes)
    size = together(per_prompt, f"outputs of {n_heads} heads on prompts of {length} pairs")
    if len(prompts) <= size:
        return _head_outputs(weights, prompts)
    return torch.cat([_head_outputs(weights, prompts[rows]) for rows in chunks(len(prompts), size)])


def _head_outputs(weights: AttentionWeights, prompts: Prompts) -> Float[Tensor, "batch head d_y"]:
    keys = prompts.tokens if weights.attend_to_self else prompts.context_tokens
    pattern, _, averaged = attend(weights, keys, prompts.x_query)
    outputs = torch.einsum("bmh,hmn->bhn", averaged, weights.OV)
    if weights.b_V is None:
        return outputs
    constant = torch.einsum("he,hen->hn", weights.b_V, weights.W_O)
    return outputs + pattern.sum(1)[..., None] * constant


def share_of(outputs: Float[Tensor, "batch *models head d_y"]) -> Float[Tensor, "*models head"]:
    """Standard deviation of each head's output over prompts, divided by the sum of these over heads."""
    spread = outputs.var(0).sum(-1).sqrt()
    return spread / spread.sum(-1, keepdim=True).clamp_min(1e-300)


def predict(weights: AttentionWeights, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Prediction of one model: sum of its heads' outputs and b_O, in units of y.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> generator = generator_for(0, "eval", 0)
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator, dtype=torch.float64)
        >>> predict(zero_head(d_x=5), prompts).any()
        tensor(False)
    """
    prediction = head_outputs(weights, prompts).sum(1)
    return prediction if weights.b_O is None else prediction + weights.b_O
