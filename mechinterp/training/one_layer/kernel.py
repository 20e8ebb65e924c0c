"""Compiled training step: loss and gradient of many one-layer models, a block of prompts at a time.

The scores, pattern and average of a head and their gradients are numbers per prompt, so all arithmetic runs over vectors
of LANES prompts. A block of contexts stays in the L1 cache while every head reads it. No sum runs over heads of
different models, so a model gets the same bits in any pack. Sums over pairs are in the order of the pairs, and blocks take
turns with two sums, whatever is computed side by side.

Importing this module compiles it, or loads the compiled code of an earlier import.
"""

# mypy: no-check-untyped-defs
import numpy as np
from numba import types

from mechinterp.training.batches import LANES, WHOLE
from mechinterp.training.lanes import (
    aligned,
    aligned_zeros,
    borrowed,
    compiled,
    exponential,
    fill,
    larger,
    load_lanes,
    store_lanes,
    total,
)

STEP_SCORES = ("softmax", "1+tanh", "1+Cx", "(1+Cx)^2", "linear")
"""Names of the scores that the step knows; their numbers are known in this file alone."""
_SOFTMAX, TANH, AFFINE, SQUARE, _LINEAR = range(len(STEP_SCORES))


@compiled()
def block_of(rows, first, block):
    """Rows of [batch, axis] as lanes; lanes beyond the batch are 0."""
    block[:] = 0
    for b in range(min(LANES, rows.shape[0] - first)):
        for i in range(rows.shape[1]):
            block[i * LANES + b] = rows[first + b, i]


@compiled()
def context_block(x, y, first, block):
    """Tokens (x, y) of a block of prompts as lanes [context, d_model]; lanes beyond the batch are 0."""
    length, d_x, d_y = x.shape[1], x.shape[2], y.shape[2]
    n_prompts = min(LANES, x.shape[0] - first)
    tokens = block.reshape(length, d_x + d_y, LANES)
    if n_prompts < LANES:
        block[:] = 0
    for pair in range(length):
        for i in range(d_x):
            row = tokens[pair, i]
            for b in range(n_prompts):
                row[b] = x[first + b, pair, i]
        for n in range(d_y):
            row = tokens[pair, d_x + n]
            for b in range(n_prompts):
                row[b] = y[first + b, pair, n]


@compiled()
def product_with(factors, context, pair, start):
    """start + sum_m factor_m token_m for one pair."""
    n = factors.size // LANES
    for m in range(n):
        start = start + load_lanes(factors, m) * load_lanes(context, pair * n + m)
    return start


@compiled()
def eight_products_with(factors, context, pair, start):
    """`product_with` for eight pairs at a time, so that each factor is loaded once for them."""
    n = factors.size // LANES
    s0, s1, s2, s3, s4, s5, s6, s7 = start, start, start, start, start, start, start, start
    for m in range(n):
        factor, index = load_lanes(factors, m), pair * n + m
        s0 = s0 + factor * load_lanes(context, index)
        s1 = s1 + factor * load_lanes(context, index + n)
        s2 = s2 + factor * load_lanes(context, index + 2 * n)
        s3 = s3 + factor * load_lanes(context, index + 3 * n)
        s4 = s4 + factor * load_lanes(context, index + 4 * n)
        s5 = s5 + factor * load_lanes(context, index + 5 * n)
        s6 = s6 + factor * load_lanes(context, index + 6 * n)
        s7 = s7 + factor * load_lanes(context, index + 7 * n)
    return s0, s1, s2, s3, s4, s5, s6, s7


@compiled()
def score_block(QK, query, context, keys, scores):
    """Scores x_query QK (x_l, y_l)^T; returns the largest score of each prompt."""
    d_x, d_model = QK.shape
    for m in range(d_model):
        key = fill(0.0)
        for i in range(d_x):
            key = key + load_lanes(query, i) * QK[i, m]
        store_lanes(keys, m, key)
    peak, length = fill(-np.inf), scores.size // LANES
    in_eights = length - length % 8
    for pair in range(0, in_eights, 8):
        for k, score in enumerate(eight_products_with(keys, context, pair, fill(0.0))):
            store_lanes(scores, pair + k, score)
            peak = larger(score, peak)
    for pair in range(in_eights, length):
        score = product_with(keys, context, pair, fill(0.0))
        store_lanes(scores, pair, score)
        peak = larger(score, peak)
    return peak


@compiled()
def activate(score, slope, peak, values, slopes):
    """Set f and f' (softmax: f only) of the scores; returns the factor that normalises both."""
    length = values.size // LANES
    whole = fill(0.0)
    if score == _SOFTMAX:
        for pair in range(length):
            value = exponential(load_lanes(values, pair) - peak)
            store_lanes(values, pair, value)
            whole = whole + value
        return fill(1.0) / whole
    for pair in range(length):
        s = load_lanes(values, pair)
        if score == TANH:
            # 1 + tanh(s), without cancellation for very negative s.
            value = fill(2.0) / (exponential(s * -2.0) + 1.0)
            derivative = value * (fill(2.0) - value)
        elif score == SQUARE:
            root = s * slope + 1.0
            value, derivative = root * root, root * (slope + slope)
        elif score == AFFINE:
            value, derivative = s * slope + 1.0, fill(slope)
        else:
            value, derivative = s * slope, fill(slope)
        store_lanes(values, pair, value)
        store_lanes(slopes, pair, derivative)
        whole = whole + value
    return fill(1.0) if score == _LINEAR else fill(1.0) / whole


@compiled()
def weighted_sum(values, context, d_model, m):
    """Weighted sum over the pairs of entry m of the tokens."""
    total = fill(0.0)
    for pair in range(values.size // LANES):
        total = total + load_lanes(values, pair) * load_lanes(context, pair * d_model + m)
    return total


@compiled()
def three_weighted_sums(values, context, d_model, m):
    """Weighted sums of entries m, m + 1 and m + 2: three sums side by side do not wait for each other."""
    first, second, third = fill(0.0), fill(0.0), fill(0.0)
    for pair in range(values.size // LANES):
        weight, index = load_lanes(values, pair), pair * d_model + m
        first = first + weight * load_lanes(context, index)
        second = second + weight * load_lanes(context, index + 1)
        third = third + weight * load_lanes(context, index + 2)
    return first, second, third


@compiled()
def six_weighted_sums(values, context, d_model, m):
    """Weighted sums of entries m to m + 5."""
    s0, s1, s2, s3, s4, s5 = fill(0.0), fill(0.0), fill(0.0), fill(0.0), fill(0.0), fill(0.0)
    for pair in range(values.size // LANES):
        weight, index = load_lanes(values, pair), pair * d_model + m
        s0 = s0 + weight * load_lanes(context, index)
        s1 = s1 + weight * load_lanes(context, index + 1)
        s2 = s2 + weight * load_lanes(context, index + 2)
        s3 = s3 + weight * load_lanes(context, index + 3)
        s4 = s4 + weight * load_lanes(context, index + 4)
        s5 = s5 + weight * load_lanes(context, index + 5)
    return s0, s1, s2, s3, s4, s5


@compiled()
def set_weighted_sums(values, context, sums):
    """Weighted sum over the pairs of every entry of the tokens, [d_model]."""
    d_model = sums.size // LANES
    in_sixes = d_model - d_model % 6
    for m in range(0, in_sixes, 6):
        for k, weighted in enumerate(six_weighted_sums(values, context, d_model, m)):
            store_lanes(sums, m + k, weighted)
    in_threes = d_model - d_model % 3
    for m in range(in_sixes, in_threes, 3):
        for k, weighted in enumerate(three_weighted_sums(values, context, d_model, m)):
            store_lanes(sums, m + k, weighted)
    for m in range(in_threes, d_model):
        store_lanes(sums, m, weighted_sum(values, context, d_model, m))


@compiled()
def add_QK_gradient(slopes, centre, context, query, d_averaged, d_key, d_QK):
    """Add one block's part of the gradient in QK, lanes [d_x, d_model]; `slopes` becomes the gradient in the scores."""
    # dp_i/ds_k = slope_k (1[i = k] - p_i): `centre` is sum_i p_i reading_i, and 0 in linear attention.
    d_model, length, start = d_averaged.size // LANES, slopes.size // LANES, fill(0.0) - centre
    in_eights = length - length % 8
    for pair in range(0, in_eights, 8):
        for k, value in enumerate(eight_products_with(d_averaged, context, pair, start)):
            store_lanes(slopes, pair + k, value * load_lanes(slopes, pair + k))
    for pair in range(in_eights, length):
        value = product_with(d_averaged, context, pair, start)
        store_lanes(slopes, pair, value * load_lanes(slopes, pair))
    set_weighted_sums(slopes, context, d_key)
    for i in range(query.size // LANES):
        for m in range(d_model):
            index = i * d_model + m
            store_lanes(
                d_QK, index, load_lanes(d_QK, index) + load_lanes(query, i) * load_lanes(d_key, m)
            )


@compiled()
def predict_block(OV, averaged, error):
    """Add a head's outputs, [d_y], to `error`."""
    for n in range(OV.shape[1]):
        output = load_lanes(error, n)
        for m in range(OV.shape[0]):
            output = output + load_lanes(averaged, m) * OV[m, n]
        store_lanes(error, n, output)


@compiled()
def add_OV_gradient(OV, averaged, d_output, d_averaged, d_OV):
    """Add one block's part of the gradient in OV, set the gradient in the averaged token, and return its centre."""
    d_model, d_y = OV.shape
    centre = fill(0.0)
    for m in range(d_model):
        d_mean, mean = fill(0.0), load_lanes(averaged, m)
        for n in range(d_y):
            index = m * d_y + n
            store_lanes(d_OV, index, load_lanes(d_OV, index) + mean * load_lanes(d_output, n))
            d_mean = d_mean + load_lanes(d_output, n) * OV[m, n]
        store_lanes(d_averaged, m, d_mean)
        centre = centre + d_mean * mean
    return centre


@compiled()
def scale_block(block, factor):
    """block *= factor."""
    for index in range(block.size // LANES):
        store_lanes(block, index, load_lanes(block, index) * factor)


@compiled()
def block_gradients(block, circuits, slots, score, slope, scratch, squares, d_circuits):
    """Add one block's part to each model's squared error and, without their common factor, to its gradients."""
    context, query, target = borrowed(block[0]), borrowed(block[1]), borrowed(block[2])
    QK, OV = borrowed(circuits[0]), borrowed(circuits[1])
    d_QK, d_OV = borrowed(d_circuits[0]), borrowed(d_circuits[1])
    values, slopes, averaged = borrowed(scratch[0]), borrowed(scratch[1]), borrowed(scratch[2])
    inverses, error = borrowed(scratch[3]), borrowed(scratch[4])
    keys, d_keys = borrowed(scratch[5]), borrowed(scratch[6])
    n_heads, d_y, n_slots = OV.shape[0], OV.shape[2], slots.shape[1]
    for model in range(slots.shape[0]):
        for n in range(d_y):
            store_lanes(error, n, fill(0.0) - load_lanes(target, n))
        for slot in range(n_slots):
            head = slots[model, slot]
            if head < n_heads:
                peak = score_block(QK[head], query, context, keys, values[slot])
                inverse = activate(score, slope, peak, values[slot], slopes[slot])
                store_lanes(inverses, slot, inverse)
                set_weighted_sums(values[slot], context, averaged[slot])
                scale_block(averaged[slot], inverse)
                predict_block(OV[head], averaged[slot], error)
        square = load_lanes(squares, model)
        for n in range(d_y):
            square = square + load_lanes(error, n) * load_lanes(error, n)
        store_lanes(squares, model, square)
        for slot in range(n_slots):
            head, inverse = slots[model, slot], load_lanes(inverses, slot)
            if head < n_heads:
                centre = add_OV_gradient(OV[head], averaged[slot], error, keys, d_OV[head])
                scale_block(keys, inverse)
                centre = fill(0.0) if score == _LINEAR else centre * inverse
                add_QK_gradient(slopes[slot], centre, context, query, keys, d_keys, d_QK[head])


@compiled()
def circuit_gradients(x, y, x_query, y_query, QK, OV, slots, score, slope, loss, d_QK, d_OV):
    """Set the loss of every model, and its gradient in QK[:, :d_x] and OV."""
    batch, length, d_x = x.shape
    n_heads, d_model, d_y = OV.shape
    n_slots, size = slots.shape[1], length * LANES
    context, query = aligned(length * d_model * LANES), aligned(d_x * LANES)
    target, squares = aligned(d_y * LANES), aligned_zeros(2, loss.size)
    QK_sums = aligned_zeros(2 * n_heads, d_x * d_model).reshape(2, n_heads, -1)
    OV_sums = aligned_zeros(2 * n_heads, d_model * d_y).reshape(2, n_heads, -1)
    values = aligned(n_slots * size).reshape(n_slots, size)
    slopes = values if score == _SOFTMAX else aligned(n_slots * size).reshape(n_slots, size)
    averaged = aligned(n_slots * d_model * LANES).reshape(n_slots, d_model * LANES)
    inverses, error = aligned(n_slots * LANES), aligned(d_y * LANES)
    keys, d_keys = aligned(d_model * LANES), aligned(d_model * LANES)
    scratch = (values, slopes, averaged, inverses, error, keys, d_keys)
    for first in range(0, -(-batch // WHOLE) * WHOLE, LANES):
        turn = first // LANES % 2
        context_block(x, y, first, context)
        block_of(x_query, first, query)
        block_of(y_query, first, target)
        block_gradients(
            (context, query, target),
            (QK, OV),
            slots,
            score,
            slope,
            scratch,
            squares[turn],
            (QK_sums[turn], OV_sums[turn]),
        )
    count = np.float32(batch * d_y)
    sum_lanes(squares, np.float32(1) / count, loss)
    for head in range(n_heads):
        sum_lanes(QK_sums[:, head], np.float32(2) / count, d_QK[head].reshape(d_x * d_model))
        sum_lanes(OV_sums[:, head], np.float32(2) / count, d_OV[head].reshape(d_model * d_y))


@compiled()
def sum_lanes(blocks, factor, sums):
    """Sums over two blocks and over lanes, times factor."""
    first, second = blocks[0], blocks[1]
    for index in range(sums.size):
        sums[index] = total(load_lanes(first, index) + load_lanes(second, index)) * factor


@compiled()
def add_product(left, right, factor, product):
    """product += factor * left right."""
    for i in range(left.shape[0]):
        for k in range(left.shape[1]):
            entry = factor * left[i, k]
            for j in range(right.shape[1]):
                product[i, j] += entry * right[k, j]


@compiled(
    types.void(
        *[types.Array(types.float32, 3, "A")] * 2,
        *[types.Array(types.float32, 2, "A")] * 2,
        *[types.Array(types.float32, 3, "A")] * 4,
        types.Array(types.int64, 2, "A"),
        *(types.int64, types.float32, types.float32),
        types.Array(types.float32, 1, "C"),
        *[types.Array(types.float32, 3, "A")] * 4,
    )
)
def set_loss_and_gradients(
    x, y, x_query, y_query, W_Q, W_K, W_V, W_O, slots, score, slope, scale, loss, d_Q, d_K, d_V, d_O
):
    """Set the loss of every model and its gradient in its weights; the gradient arrays must be zero at the start.

    `slots` are the heads of each model, [model, slot]; the number n_heads marks an empty slot. `score` is an index in
    STEP_SCORES. "linear/L" uses the index of "linear", with slope C divided by the number of keys.
    """
    d_x, (n_heads, d_model, d_y) = x.shape[2], (W_O.shape[0], W_Q.shape[1], W_O.shape[2])
    QK = np.zeros((n_heads, d_x, d_model), np.float32)
    OV = np.zeros((n_heads, d_model, d_y), np.float32)
    one = np.float32(1)
    for h in range(n_heads):
        add_product(W_Q[h, :d_x], W_K[h].T, scale, QK[h])
        add_product(W_V[h], W_O[h], one, OV[h])
    d_QK, d_OV = np.empty_like(QK), np.empty_like(OV)
    circuit_gradients(x, y, x_query, y_query, QK, OV, slots, score, slope, loss, d_QK, d_OV)
    for h in range(n_heads):
        # Only the x rows of W_Q are used: the query's y slot is 0.
        add_product(d_QK[h], W_K[h], scale, d_Q[h, :d_x])
        add_product(d_QK[h].T, W_Q[h, :d_x], scale, d_K[h])
        add_product(d_OV[h], W_O[h].T, one, d_V[h])
        add_product(W_V[h].T, d_OV[h], one, d_O[h])
