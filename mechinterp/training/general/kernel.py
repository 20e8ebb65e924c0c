"""Compiled attention of one layer, forward and backward: all heads, a block of prompts at a time.

Prompts lie along the last axis of every tensor, so that all arithmetic runs over vectors of LANES prompts. Matrix
products with weights are left to torch, as one product for all prompts. Keys and values that all heads share are
stored once.

Importing this module compiles it, or loads the compiled code of an earlier import.
"""

# mypy: no-check-untyped-defs
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mechinterp.training.batches import LANES
from mechinterp.training.lanes import (
    VECTOR,
    compiled,
    exponential,
    fill,
    lanes,
    larger,
    load_lanes,
    store_lanes,
)

SCORE_KINDS = ("linear", "relu/L", "softmax")
_LINEAR, _RELU, _SOFTMAX = range(len(SCORE_KINDS))
_HEADS = types.Array(types.float32, 4, "C")


@compiled()
def gather(source, block, n_rows, target):
    """The first rows of one block of [feature, row, prompt], as lanes [feature, row]."""
    n_features, rows, n_prompts = source.shape
    flat, n_blocks = source.reshape(source.size), n_prompts // LANES
    for f in range(n_features):
        for row in range(n_rows):
            store_lanes(
                target, f * n_rows + row, load_lanes(flat, (f * rows + row) * n_blocks + block)
            )


@compiled()
def scatter(source, block, n_rows, target):
    """Set the first rows of one block of [feature, row, prompt] to lanes [feature, row], and the others to 0."""
    n_features, rows, n_prompts = target.shape
    flat, n_blocks = target.reshape(target.size), n_prompts // LANES
    for f in range(n_features):
        for row in range(rows):
            value = load_lanes(source, f * n_rows + row) if row < n_rows else fill(0.0)
            store_lanes(flat, (f * rows + row) * n_blocks + block, value)


@compiled()
def products(left, i, n_left, right, n_right, n_features, sums):
    """sums_j = sum_f left[f, i] right[f, j]; three j at a time, so that left[f, i] is loaded once for them."""
    last = n_right - 1
    for j in range(0, n_right, 3):
        j1, j2 = min(j + 1, last), min(j + 2, last)
        s0, s1, s2 = fill(0.0), fill(0.0), fill(0.0)
        for f in range(n_features):
            factor, row = load_lanes(left, f * n_left + i), f * n_right
            s0 = s0 + factor * load_lanes(right, row + j)
            s1 = s1 + factor * load_lanes(right, row + j1)
            s2 = s2 + factor * load_lanes(right, row + j2)
        store_lanes(sums, j, s0)
        store_lanes(sums, j1, s1)
        store_lanes(sums, j2, s2)


@compiled()
def combine(weights, start, stride, n, rows, n_features, i, n_out, out, add):
    """Set out[f, i] to sum_j weights[start + j * stride] rows[f, j], or add the sum to it; three features at a time."""
    last = n_features - 1
    for f in range(0, n_features, 3):
        f1, f2 = min(f + 1, last), min(f + 2, last)
        s0, s1, s2 = fill(0.0), fill(0.0), fill(0.0)
        for j in range(n):
            weight = load_lanes(weights, start + j * stride)
            s0 = s0 + weight * load_lanes(rows, f * n + j)
            s1 = s1 + weight * load_lanes(rows, f1 * n + j)
            s2 = s2 + weight * load_lanes(rows, f2 * n + j)
        if add:
            s0 = s0 + load_lanes(out, f * n_out + i)
            s1 = s1 + load_lanes(out, f1 * n_out + i)
            s2 = s2 + load_lanes(out, f2 * n_out + i)
        store_lanes(out, f * n_out + i, s0)
        store_lanes(out, f1 * n_out + i, s1)
        store_lanes(out, f2 * n_out + i, s2)


@compiled()
def weigh(kind, factor, scores, n, pattern, first):
    """Attention weights of one query, from its scores."""
    if kind == _SOFTMAX:
        peak = load_lanes(scores, 0)
        for j in range(1, n):
            peak = larger(load_lanes(scores, j), peak)
        whole = fill(0.0)
        for j in range(n):
            value = exponential(load_lanes(scores, j) - peak)
            store_lanes(scores, j, value)
            whole = whole + value
        inverse = fill(1.0) / whole
    else:
        inverse = fill(factor)
    for j in range(n):
        value = load_lanes(scores, j)
        if kind == _RELU:
            value = larger(fill(0.0), value)
        store_lanes(pattern, first + j, value * inverse)


@intrinsic
def where(_context, condition, value):
    """The value in lanes where the condition is not 0, else 0."""

    def code(_target, builder, _signature, arguments):
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        met = builder.fcmp_unordered("!=", arguments[0], zero)
        return builder.select(met, arguments[1], zero)

    return lanes(lanes, lanes), code


@compiled()
def score_gradient(kind, factor, pattern, first, n, changes):
    """Change the gradient in the attention weights of a query, in place, to the gradient in its scores."""
    centre = fill(0.0)
    if kind == _SOFTMAX:
        for j in range(n):
            centre = centre + load_lanes(pattern, first + j) * load_lanes(changes, j)
    for j in range(n):
        weight, change = load_lanes(pattern, first + j), load_lanes(changes, j)
        if kind == _SOFTMAX:
            change = weight * (change - centre)
        elif kind == _RELU:
            change = where(weight, change * factor)
        else:
            change = change * factor
        store_lanes(changes, j, change)


@compiled(
    types.void(_HEADS, _HEADS, _HEADS, types.int64, types.int64, types.float32, _HEADS, _HEADS)
)
def attend_blocks(q, k, v, n_keys, kind, factor, patterns, z):
    """Set the attention weights [block, head, query and key, lane] and the weighted averages z of every head.

    Queries, keys and values are [head, feature, row, prompt]; the first `n_keys` rows of keys and values are read.
    """
    n_heads, size, n_rows, n_prompts = q.shape
    query, out = np.empty((2, size * n_rows * LANES), np.float32)
    key, value = np.empty((2, size * n_keys * LANES), np.float32)
    scores = np.empty(n_keys * LANES, np.float32)
    for block in range(n_prompts // LANES):
        for h in range(n_heads):
            pattern = patterns[block, h].reshape(patterns[block, h].size)
            gather(q[h], block, n_rows, query)
            if h < k.shape[0]:
                gather(k[h], block, n_keys, key)
                gather(v[h], block, n_keys, value)
            for i in range(n_rows):
                products(query, i, n_rows, key, n_keys, size, scores)
                weigh(kind, factor, scores, n_keys, pattern, i * n_keys)
                combine(pattern, i * n_keys, 1, n_keys, value, size, i, n_rows, out, False)
            scatter(out, block, n_rows, z[h])


@compiled(types.void(*[_HEADS] * 3, types.int64, types.int64, types.float32, *[_HEADS] * 5))
def attend_blocks_back(q, k, v, n_keys, kind, factor, patterns, d_z, d_q, d_k, d_v):
    """Set the gradients in queries, keys and values, from the gradient `d_z` in the weighted averages."""
    n_heads, size, n_rows, n_prompts = q.shape
    query, d_out, d_query = np.empty((3, size * n_rows * LANES), np.float32)
    key, value, d_key, d_value = np.empty((4, size * n_keys * LANES), np.float32)
    changes = np.empty((n_rows, n_keys * LANES), np.float32)
    flat = changes.reshape(changes.size)
    for block in range(n_prompts // LANES):
        for h in range(n_heads):
            shared = h >= k.shape[0]
            pattern = patterns[block, h].reshape(patterns[block, h].size)
            gather(q[h], block, n_rows, query)
            gather(d_z[h], block, n_rows, d_out)
            if h < k.shape[0]:
                gather(k[h], block, n_keys, key)
                gather(v[h], block, n_keys, value)
            for i in range(n_rows):
                products(d_out, i, n_rows, value, n_keys, size, changes[i])
                score_gradient(kind, factor, pattern, i * n_keys, n_keys, changes[i])
                combine(flat, i * n_keys, 1, n_keys, key, size, i, n_rows, d_query, False)
            for j in range(n_keys):
                combine(flat, j, n_keys, n_rows, query, size, j, n_keys, d_key, shared)
                combine(pattern, j, n_keys, n_rows, d_out, size, j, n_keys, d_value, shared)
            scatter(d_query, block, n_rows, d_q[h])
            scatter(d_key, block, n_keys, d_k[h % k.shape[0]])
            scatter(d_value, block, n_keys, d_v[h % k.shape[0]])
