"""One layer of attention in a file for TransformerLens: everything else in it must be zero."""

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.tensors.kinds import WORD_MODEL
from mechinterp.checkpoints.foreign.tensors.layout import Layout, layout_of
from mechinterp.checkpoints.foreign.tensors.names import ATTENTION, Tensors, is_harmless
from mechinterp.checkpoints.foreign.tensors.refusals import TensorError
from mechinterp.config.model import NAMES

PREFIX = "blocks.0.attn."
MASK = PREFIX + "mask"
ZERO = {
    "words": "tokens must be vectors (x, y) that enter by start_at_layer=0; with an embedding it is a model of word tokens",
    "positions": "tokens are vectors (x, y), without added positions",
    "read_out": "the model has no bias after its read-out",
    "mlp_in": "the model has no MLP",
    "mlp_out": "the model has no MLP",
}
"""Parts that our model does not have, but every HookedTransformer has, with the reason why they
must be zero."""


def hooked_layer(
    tensors: Tensors, d_y: int | None = None
) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """Attention of a HookedTransformer or a Bridge, and `attend_to_self` if a stored mask shows it.

    If there is a read-out, outputs are cut to the y entries, whose number is the read-out's width.

    Args:
        d_y: Number of responses; None: the width of the read-out.
    Raises:
        ValueError: If the tensors are not a causal one-layer model that predicts the y entries, without positions, norms
            and MLP.
    """
    kept = {n: t for n, t in tensors.items() if n != MASK and not is_harmless(n, t)}
    layout = layout_of(kept)
    _require_attention_alone(layout, tensors)
    attention = {p.name: tensors[p.name] for p in layout.layers[0] if p.part in ATTENTION}
    if (read_out := layout.ends.get(("read_out", "weight"))) is not None:
        d_y = _read_responses(read_out.name, tensors, d_y)
        written = {p.name for p in layout.layers[0] if p.part == "o"}
        attention |= {name: attention[name][..., -d_y:] for name in written}
    return attention, _mask_says(tensors)


def _require_attention_alone(layout: Layout, tensors: Tensors) -> None:
    words = layout.ends.get(("words", "weight"))
    if words is not None and len(layout.layers) != 1 and len(tensors[words.name]) > 1:
        raise ValueError(f"{WORD_MODEL.format(words.name, list(tensors[words.name].shape))}")
    if len(layout.layers) != 1:
        raise ValueError(f"the model must have one layer, got {len(layout.layers)}.")
    norms = (piece.name for piece in layout.pieces if "norm" in piece.part)
    if strange := [*layout.unknown, *norms]:
        rule = "is not among the tensors of an attention-only HookedTransformer of one layer"
        raise TensorError(strange[0], rule)
    # Whatever shows that it is a model of words comes first.
    for part, reason in ZERO.items():
        for piece in layout.pieces:
            if piece.part == part and (part, piece.kind) != ("read_out", "weight"):
                require_zero(piece.name, tensors[piece.name], reason)
    for name in (PREFIX + each for each in NAMES):
        if name not in tensors or tensors[name].ndim != 3:
            got = f"shape {tuple(tensors[name].shape)}" if name in tensors else "nothing"
            raise TensorError(name, f"must have three axes, head first, got {got}")


def _read_responses(name: str, tensors: Tensors, d_y: int | None) -> int:
    """Number of responses of a read-out, which must copy the last entries."""
    read_out, d_model = tensors[name], tensors[PREFIX + "W_Q"].shape[1]
    d_y = (read_out.shape[1] if read_out.ndim == 2 else 1) if d_y is None else d_y
    expected = torch.eye(d_model, dtype=torch.float32, device="cpu")[:, d_model - d_y :]
    if d_y >= d_model or not torch.equal(read_out.to(expected), expected):
        rule = f"must copy the y entries, [d_model, d_y] = {list(expected.shape)} with ones"
        got = f"at y and zeros elsewhere, got another of shape {list(read_out.shape)}"
        raise TensorError(name, f"{rule} {got}")
    return d_y


def require_zero(name: str, tensor: Tensor, reason: str) -> None:
    """Refuse a tensor with nonzero entries, as our model has no such part."""
    if tensor.any():
        largest = tensor.to(torch.complex128).abs().max().item()
        raise TensorError(name, f"must be zero ({reason}), got entries up to {largest:.3g}")


def _mask_says(tensors: Tensors) -> dict[str, bool]:
    """`attend_to_self` as a stored mask shows it; empty without a mask, or with the empty one of
    version 3.5.0 and later."""
    mask = tensors.get(MASK)
    if mask is None or mask.numel() == 0:
        return {}
    allowed = torch.ones(mask.shape, dtype=torch.bool, device=mask.device)
    for diagonal, attends in ((-1, False), (0, True)):
        if mask.ndim == 2 and torch.equal(mask.bool(), allowed.tril(diagonal)):
            return {"attend_to_self": attends}
    rule = "must be causal, mask.tril(-1) or mask.tril()"
    raise TensorError(MASK, f"{rule}, got another of shape {list(mask.shape)}")
