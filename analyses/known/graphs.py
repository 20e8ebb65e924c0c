"""Parts of hand-made stacks: heads that write steps of gradient descent into slots of the stream, and small exact MLPs.

The stream is [x | y | s | t]. The y slot holds y - <w, x>, for the query minus the prediction; s and t start at 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from analyses.known.models import TASK
from mechinterp.config import ModelConfig
from mechinterp.config.model import stacked_shapes
from mechinterp.icl.prompts import generator_for
from mechinterp.models.constructions import descent
from mechinterp.models.weights import Weights

D_X = TASK.d_x
Y, S, T = D_X, D_X + 1, D_X + 2
NARROW, FULL = D_X + 1, D_X + 3
"""Widths of a stream without slots and with both."""
EPSILON = 1e-3
"""Size at which gelu(u) + gelu(-u) = u erf(u / sqrt 2) is sqrt(2 / pi) u^2, up to u^2 / 6 of it."""
SQUARED = math.sqrt(2 / math.pi) * EPSILON**2


@dataclass(frozen=True, eq=False)
class Head:
    """Head with scores <x_k, diag(scores) x_l> that reads y and writes it into slots."""

    writes: Mapping[int, float]
    """Factor on the average of y for each slot."""
    scores: Sequence[float] = (1.0,) * D_X


def step(eta: float) -> Head:
    """Head that takes a step of gradient descent in the y slot."""
    return Head({Y: -eta})


@dataclass(frozen=True, eq=False)
class Mlp:
    """MLP whose hidden entries read combinations of slots, and write into slots."""

    reads: Sequence[Mapping[int, float]]
    writes: Sequence[Mapping[int, float]]
    activation: str = "relu"
    b_in: Sequence[float] = ()
    b_out: Mapping[int, float] | None = None


def carrying() -> Mlp:
    """y - s, and s is cleared, by s = relu(s) - relu(-s)."""
    return Mlp([{S: 1}, {S: -1}], [{Y: -1, S: -1}, {Y: 1, S: 1}])


def clipping(limit: float) -> Mlp:
    """y - min(max(s, -limit), limit)."""
    return Mlp([{S: 1}, {S: 1}], [{Y: -1}, {Y: 1}], b_in=(limit, -limit), b_out={Y: limit})


def squaring() -> Mlp:
    """y - s^2."""
    out = {Y: -1 / SQUARED}
    return Mlp([{S: EPSILON}, {S: -EPSILON}], [out, out], "gelu")


def multiplying() -> Mlp:
    """y - s t, by the squares of s + t and s - t."""
    plus, minus = {S: EPSILON, T: EPSILON}, {S: EPSILON, T: -EPSILON}
    reads = [plus, _negative(plus), minus, _negative(minus)]
    return Mlp(reads, [{Y: f / 4 / SQUARED} for f in (-1, -1, 1, 1)], "gelu")


def larger() -> Mlp:
    """y - max(s, t), and s and t are cleared: max(s, t) = t + relu(s - t)."""
    return _with_cleared({S: 1, T: -1}, -1)


def smaller() -> Mlp:
    """y - min(s, t), and s and t are cleared: min(s, t) = t - relu(t - s)."""
    return _with_cleared({S: -1, T: 1}, 1)


def sorting() -> Mlp:
    """s becomes the larger and t the smaller of both: s + relu(t - s) and t - relu(t - s)."""
    return Mlp([{S: -1, T: 1}, {}], [{S: 1, T: -1}, {}])


def either() -> Mlp:
    """After `sorting`, y minus the one of larger size if both have one sign, else minus their sum. So if one is 0, the
    other counts."""
    return Mlp([{S: 1}, {T: -1}], [{Y: -1}, {Y: 1}])


def both() -> Mlp:
    """After `sorting`, y minus the one of smaller size if both have one sign, else nothing. So if one is 0, nothing counts."""
    return Mlp([{T: 1}, {S: -1}], [{Y: -1}, {Y: 1}])


def _with_cleared(difference: Mapping[int, float], factor: float) -> Mlp:
    reads = [difference, {T: 1}, {T: -1}, {S: 1}, {S: -1}]
    writes = [{Y: factor}, {Y: -1, T: -1}, {Y: 1, T: 1}, {S: -1}, {S: 1}]
    return Mlp(reads, writes)


def _negative(reads: Mapping[int, float]) -> dict[int, float]:
    return {slot: -value for slot, value in reads.items()}


def stack(
    layers: Sequence[Sequence[Head]],
    *mlps: Mlp,
    width: int = NARROW,
    score: str = "linear/L",
) -> Weights:
    """Model of these heads in float64, with one MLP after every layer, or one for each."""
    n_heads, first = max(map(len, layers)), mlps[0] if mlps else None
    model = ModelConfig(
        n_layers=len(layers),
        n_heads=n_heads,
        d_head=width,
        d_model=width,
        score=score,
        context_only=True,
        biases=any(mlp.b_in for mlp in mlps),
        d_mlp=None if first is None else len(first.reads),
        activation="relu" if first is None else first.activation,
    )
    tensors = {
        name: torch.zeros(shape, dtype=torch.float64)
        for name, shape in stacked_shapes(model, D_X, 1).items()
    }
    for layer, heads in enumerate(layers):
        for number, head in enumerate(heads):
            _add_head(tensors, (layer, number), head, width)
    for layer in range(len(layers) if mlps else 0):
        _add_mlp(tensors, layer, mlps[layer % len(mlps)])
    tensors["W_in"][:, : D_X + 1] = torch.eye(D_X + 1, dtype=torch.float64)
    tensors["unembed.W_U"][Y] = -1
    return Weights(model, D_X, 1, tensors, width**-0.5)


def _add_head(
    tensors: Mapping[str, Tensor], place: tuple[int, int], head: Head, width: int
) -> None:
    identity = torch.eye(width, dtype=torch.float64)
    scores = torch.tensor([*head.scores], dtype=torch.float64).diag()
    # Undoes the scale of the scores.
    tensors["attn.W_Q"][place][:D_X, :D_X] = scores * width**0.5
    tensors["attn.W_K"][place][:] = identity
    tensors["attn.W_V"][place][:] = identity
    for slot, factor in head.writes.items():
        tensors["attn.W_O"][place][Y, slot] = factor


def _add_mlp(tensors: Mapping[str, Tensor], layer: int, mlp: Mlp) -> None:
    for hidden, (reads, writes) in enumerate(zip(mlp.reads, mlp.writes, strict=True)):
        for slot, value in reads.items():
            tensors["mlp.W_in"][layer, slot, hidden] = value
        for slot, value in writes.items():
            tensors["mlp.W_out"][layer, hidden, slot] = value
    for hidden, value in enumerate(mlp.b_in):
        tensors["mlp.b_in"][layer, hidden] = value
    for slot, value in (mlp.b_out or {}).items():
        tensors["mlp.b_out"][layer, slot] = value


def turned(weights: Weights, *, seed: int) -> Weights:
    """The same function in a random basis of the stream, MLPs included; for models without biases."""
    assert not weights.model.biases
    if weights.model.d_mlp is None:
        return descent.rotated(weights, seed=seed)
    R = descent.rotation(weights.d_model, seed=seed)
    tensors = dict(weights.tensors)
    for name in ("attn.W_Q", "attn.W_K", "attn.W_V", "mlp.W_in", "unembed.W_U"):
        tensors[name] = R.mT @ tensors[name]
    for name in ("attn.W_O", "mlp.W_out", "W_in"):
        tensors[name] = tensors[name] @ R
    return weights.with_tensors(tensors)


def drawn(like: Weights, size: float, *, seed: int) -> Weights:
    """Random weights of the same shapes: entries N(0, size^2)."""
    generator = generator_for(seed, "init", 0)
    tensors = {
        name: size * torch.randn(t.shape, generator=generator, dtype=torch.float64)
        for name, t in like.tensors.items()
    }
    return like.with_tensors(tensors)


def wide(weights: Weights, width: int, *, seed: int) -> Weights:
    """The same function in a wider stream, whose further entries hold mixtures of x that no head reads; then turned."""
    more = width - weights.d_model
    generator = generator_for(seed, "init", 1)
    tensors = {}
    for name, tensor in weights.tensors.items():
        before = name in ("attn.W_Q", "attn.W_K", "attn.W_V", "unembed.W_U")
        pad = (0, 0, 0, more) if before else (0, more)
        tensors[name] = torch.nn.functional.pad(tensor, pad)
    W_in, W_U = (
        torch.nn.functional.pad(each, pad)
        for each, pad in zip(weights.reading, ((0, more), (0, 0, 0, more)), strict=True)
    )
    W_in[: weights.d_x, weights.d_model :] = torch.randn(
        weights.d_x, more, generator=generator, dtype=torch.float64
    )
    tensors |= {"W_in": W_in, "unembed.W_U": W_U}
    model = replace(weights.model, d_model=width, d_head=weights.d_head)
    return turned(Weights(model, weights.d_x, 1, tensors, weights.scale), seed=seed)
