"""Models built by hand with known circuits, labels and predictions, for use in tests.

All have d_head = d_model and float64 weights, and their heads read only the y entries of the tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.config import SCORES, ModelConfig
from mechinterp.models.weights import Weights, identity_keys
from mechinterp.theory.linear import Heads, MergedHeads

PerHead = Sequence[float] | Sequence[Sequence[float]] | np.ndarray
"""One number per head, or one row per head."""


def one_layer(
    W_Q: Float[Tensor, "head d_model d_head"],
    W_K: Float[Tensor, "head d_model d_head"] | None,
    W_V: Float[Tensor, "head d_model d_head"],
    W_O: Float[Tensor, "head d_head d_y"],
    *,
    scale: float = math.nan,
    score: str = "softmax",
    score_slope: float = 1.0,
    attend_to_self: bool = False,
) -> Weights:
    """Model of one attention layer on tokens (x, y), from its heads.

    Rectified scores are allowed only with `context_only`, which does not change the prediction of a single layer at
    the query.

    Args:
        W_K: None: the heads are merged, and W_Q is W_QK.
        W_O: The y columns of TransformerLens' W_O; its x columns become zero.
        scale: Factor on the scores; NaN: 1/sqrt(d_head).
    Example:
        >>> eye = torch.eye(3)[None]
        >>> one_layer(eye, eye, eye, eye[..., 2:])
        Weights(1 x 1 heads, d_x=2, d_y=1, torch.float32)
    """
    (n_heads, d_model, d_head), d_y = W_V.shape, W_O.shape[2]
    context_only = score not in SCORES
    model = ModelConfig(
        n_heads=n_heads,
        d_head=None if d_head == d_model and not context_only else d_head,
        score=score,
        score_slope=score_slope,
        attend_to_self=attend_to_self,
        merged_qk=W_K is None,
        context_only=context_only,
    )
    tensors = {"W_QK": W_Q} if W_K is None else {"W_Q": W_Q, "W_K": W_K}
    tensors |= {"W_V": W_V, "W_O": pad(W_O, (d_model - d_y, 0))}
    named = {f"attn.{name}": tensor[None] for name, tensor in tensors.items()}
    return Weights(model, d_model - d_y, d_y, named, scale)


def diagonal_heads(omega: PerHead, mu: PerHead, *, d_x: int, d_y: int = 1) -> Weights:
    """Heads with QK = diag(omega_h) on the x block and OV = diag(mu_h) on the y block, zero elsewhere.

    Args:
        omega: Diagonal of each QK circuit, softmax scale included: a number per head, or per head and coordinate; unit 1/x^2.
        mu: Diagonal of each OV circuit: a number per head, or per head and response.
    Raises:
        ValueError: If omega and mu differ in length, or their rows do not have d_x and d_y entries.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (3.1), and section 5.4 for several responses.
    Example:
        >>> diagonal_heads([0.1, -0.1], [3.0, -3.0], d_x=2).mu.flatten()
        tensor([ 3., -3.], dtype=torch.float64)
    """
    n_heads, d_model = len(omega), d_x + d_y
    if n_heads != len(mu):
        raise ValueError(f"omega and mu must have one entry per head, got {n_heads} and {len(mu)}.")
    omegas, mus = _rows("omega", omega, d_x), _rows("mu", mu, d_y)
    on_x = torch.diag(torch.tensor([1.0] * d_x + [0.0] * d_y, dtype=torch.float64, device="cpu"))
    on_y = torch.eye(d_model, dtype=torch.float64, device="cpu") - on_x
    scale = d_model**-0.5
    return one_layer(
        W_Q=torch.diag_embed(pad(omegas / scale, (0, d_y))),
        W_K=on_x.expand(n_heads, -1, -1).clone(),
        W_V=on_y.expand(n_heads, -1, -1).clone(),
        W_O=torch.diag_embed(pad(mus, (d_x, 0)))[:, :, d_x:].clone(),
        scale=scale,
    )


def _rows(name: str, values: PerHead, width: int) -> Float[Tensor, "head width"]:
    rows = torch.tensor(values, dtype=torch.float64, device="cpu")
    if rows.ndim == 1:
        return rows[:, None].expand(-1, width)
    if rows.shape != (len(values), width):
        raise ValueError(f"{name} must have {width} entries per head, got {list(rows.shape)}.")
    return rows


def debiased_gradient_step(eta: float, omega: float, *, d_x: int, d_y: int = 1) -> Weights:
    """Two heads, (omega, mu) and (-omega, -mu) with mu = eta / (2 omega).

    For omega -> 0 the prediction tends to one step of debiased gradient descent of size eta; the error is of order
    omega^2.

    Raises:
        ValueError: If omega is not positive.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.9)-(4.10).
    Example:
        >>> debiased_gradient_step(0.88, 0.01, d_x=5).mu.flatten()
        tensor([ 44., -44.], dtype=torch.float64)
    """
    if omega <= 0:
        raise ValueError(f"omega must be > 0, got {omega}.")
    mu = eta / (2 * omega)
    return diagonal_heads([omega, -omega], [mu, -mu], d_x=d_x, d_y=d_y)


def kernel_head(omega: float, mu: float, *, d_x: int, d_y: int = 1) -> Weights:
    """One head that computes the Nadaraya-Watson estimate with kernel exp(omega x . x_query), times mu.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.12).
    Example:
        >>> kernel_head(0.5, 1.5, d_x=5).n_heads
        1
    """
    return diagonal_heads([omega], [mu], d_x=d_x, d_y=d_y)


def from_circuits(
    QK: Float[Tensor, "_head _d_model _d_model"],
    OV: Float[Tensor, "_head _d_model _d_y"],
    *,
    score: str = "softmax",
    score_slope: float = 1.0,
    attend_to_self: bool = False,
) -> Weights:
    """Heads with these circuits, in the dtype of QK.

    Args:
        QK: Score of each pair of coordinates, [query, key], scale included.
        OV: Weight of each token coordinate in each prediction.
        score: Attention weights, as in `mechinterp.models.layers.attention_pattern`.
    Raises:
        ValueError: If the circuits differ in number of heads or width, or d_y is not below d_model.
    Example:
        >>> heads = diagonal_heads([0.1, -0.1], [3.0, -3.0], d_x=2)
        >>> torch.allclose(from_circuits(heads.QK, heads.OV).QK, heads.QK)
        True
    """
    n_heads, d_model, d_y = OV.shape
    if QK.shape != (n_heads, d_model, d_model) or not n_heads or not 0 < d_y < d_model:
        raise ValueError(
            "QK and OV must be [head, d_model, d_model] and [head, d_model, d_y] with d_y < d_model, "
            f"got {list(QK.shape)} and {list(OV.shape)}."
        )
    W_Q, W_K = factored_scores(QK)
    W_V, W_O = factored_values(OV.to(QK), d_model)
    settings = {"score": score, "score_slope": score_slope, "attend_to_self": attend_to_self}
    return one_layer(W_Q, W_K, W_V, W_O, **settings)  # type: ignore[arg-type]


def factored_scores(QK: Float[Tensor, "head d_model d_model"]) -> tuple[Tensor, Tensor]:
    """W_Q and W_K with W_Q W_K^T / sqrt(d_head) = QK; W_K is the identity."""
    return (QK * QK.shape[1] ** 0.5).contiguous(), identity_keys(QK)


def factored_values(OV: Float[Tensor, "head d_model d_y"], d_head: int) -> tuple[Tensor, Tensor]:
    """W_V and W_O with W_V W_O = OV, for d_y <= d_head: OV padded with zeros, and the first columns of the identity."""
    n_heads, _, d_y = OV.shape
    first_rows = torch.eye(d_head, d_y, dtype=OV.dtype, device=OV.device)
    W_V = pad(OV, (0, d_head - d_y)).contiguous()
    return W_V, first_rows.expand(n_heads, -1, -1).contiguous()


def linear_attention(heads: Heads, *, score_slope: float = 1.0) -> Weights:
    """Heads of linear attention as weights of one layer: y_hat = sum_h v_h b^T U_h x_query, b = (1/L) sum_l y_l x_l.

    The x block of QK is U^T / score_slope, with U = K^T Q for separate heads. W_V writes v y into the first entry of
    the head, and W_O passes it on. All other entries are zero.

    Args:
        heads: Heads with any leading axes, such as time, which are flattened into the head axis.
        score_slope: The constant C of the score "linear/L".
    Source:
        Zhang et al. 2025, arXiv 2501.16265, sections 3.1 and 4.1, with the blocks that stay zero left at zero.
    Example:
        >>> from mechinterp.theory.linear import merged_heads
        >>> linear_attention(merged_heads(3, 2, std=0.1, seed=0)).model.merged_qk
        True
    """
    d_x = heads.M.shape[-1]
    W_K: Tensor | None = None
    if isinstance(heads, MergedHeads):
        queries = pad(_flat(heads.U), (0, 1, 0, 1)).mT
    else:
        queries, W_K = (pad(_flat(rows), (0, 1)).mT.contiguous() for rows in (heads.Q, heads.K))
    d_head = queries.shape[-1]
    scale = d_head**-0.5
    W_Q = (queries / (scale * score_slope)).contiguous()
    v = torch.from_numpy(heads.v).double().reshape(-1, 1, 1)
    W_V, W_O = factored_values(pad(v, (0, 0, d_x, 0)), d_head)
    return one_layer(W_Q, W_K, W_V, W_O, score="linear/L", score_slope=score_slope)


def _flat(matrices: Float[np.ndarray, "*stack head row d_x"]) -> Float[Tensor, "heads row d_x"]:
    """The matrices with all leading axes flattened into one."""
    return torch.from_numpy(matrices).double().reshape(-1, *matrices.shape[-2:])


def zero_head(*, d_x: int, d_y: int = 1) -> Weights:
    """One head that attends uniformly and writes nothing.

    Example:
        >>> zero_head(d_x=5).OV.abs().max().item()
        0.0
    """
    return diagonal_heads([0.0], [0.0], d_x=d_x, d_y=d_y)
