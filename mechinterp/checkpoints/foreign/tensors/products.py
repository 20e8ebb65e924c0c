"""Attention from the products of its matrices: P on values and Q on scores of each layer, or one matrix on scores."""

import re

import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.tensors.names import Tensors
from mechinterp.checkpoints.foreign.tensors.refusals import require_numbers


def is_products(tensors: Tensors) -> bool:
    """True if all tensors are `allparam`, or one P and one Q for each layer."""
    return bool(_products(tensors))


def _products(tensors: Tensors) -> list[tuple[Tensor, Tensor]]:
    """P and Q [head, n, n] of each layer; empty if the tensors are others."""
    if len(tensors) == 1:
        ((name, every),) = tensors.items()
        shaped = every.ndim == 5 and every.shape[2] == 2 and every.shape[3] == every.shape[4] > 1
        if name.rpartition(".")[2] != "allparam" or not shaped:
            return []
        return [(layer[:, 0], layer[:, 1]) for layer in every]
    found = {
        name: re.fullmatch(r"(?:(.*)[._])?([PQ])(?:[._](\d+))?(?:[.]weight)?", name)
        for name in tensors
    }
    if not tensors or not all(found.values()):
        return []
    layers: dict[str, dict[str, Tensor]] = {}
    for name, match in found.items():
        if match is not None:
            layers.setdefault(f"{match[1]}.{match[3]}", {})[match[2]] = tensors[name]
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    (shape,) = shapes if len(shapes) == 1 else ((),)
    if (
        len(shape) != 2
        or shape[0] != shape[1]
        or any(layer.keys() != {"P", "Q"} for layer in layers.values())
    ):
        return []
    order = sorted(layers, key=lambda key: [int(n) for n in re.findall(r"\d+", key)])
    return [(layers[key]["P"][None], layers[key]["Q"][None]) for key in order]


def of_products(tensors: Tensors, d_x: int | None) -> dict[str, Tensor]:
    """Attention [in, out] from matrices P on values and Q on scores: z + P Z (Z^T Q z) / N.

    P and Q of width d_x act on x; then P also passes y on.

    Raises:
        ValueError: If d_x is not stated, or does not fit.
    Source:
        Ahn et al. 2023, arXiv 2306.00297, section 2, and its code.
    """
    layers = _products(tensors)
    n = layers[0][0].shape[-1]
    if d_x not in (n - 1, n):
        got = "no --d-x (d_x=)" if d_x is None else d_x
        raise ValueError(
            f"d_x must be {n - 1} (P and Q act on x and y) or {n} (on x alone), got {got}."
        )
    named: dict[str, Tensor] = {}
    for number, (P, Q) in enumerate(layers):
        if d_x == n:
            P = pad(P, (0, 1, 0, 1))
            P[:, -1, -1] = 1
            Q = pad(Q, (0, 1, 0, 1))
        eye = torch.eye(P.shape[-1], dtype=P.dtype, device="cpu").expand_as(P)
        ways = {"W_Q": Q, "W_K": eye, "W_V": P.mT, "W_O": eye}
        named |= {f"layers.{number}.{name}": tensor.contiguous() for name, tensor in ways.items()}
    return named


def of_one_matrix(tensors: Tensors, hints: Hints) -> dict[str, Tensor]:
    """One square matrix as a merged head whose OV circuit passes on y.

    d_x says whether the matrix acts on x alone or on x and y.

    Raises:
        ValueError: If d_x is not stated, or d_x or d_y does not fit the matrix.
    """
    ((name, W),) = tensors.items()
    require_numbers(W, name)
    if hints.d_x not in (len(W) - 1, len(W)):
        got = "no --d-x (d_x=)" if hints.d_x is None else hints.d_x
        raise ValueError(
            f"d_x must be {len(W) - 1} (the matrix acts on x and y) or {len(W)} (on x alone), got {got}."
        )
    if hints.d_y not in (None, 1):
        raise ValueError(f"d_y must be 1 for a single matrix, got {hints.d_y}.")
    W = W if hints.d_x == len(W) - 1 else pad(W, (0, 1, 0, 1))
    OV = W.new_zeros(1, len(W), len(W))
    OV[0, -1, -1] = 1
    return {"QK": W[None], "OV": OV}
