"""A model built by hand that preprocesses its context and then runs gradient descent; every layer and head is known.

Its first layer reweights every covariate by the context's own correlations. Each later layer takes one step of
gradient descent on the reweighted context. All weights are float64.
"""

from collections.abc import Sequence

import torch

from mechinterp.models.constructions.stack import stack_of_layers
from mechinterp.models.weights import Weights


def preprocess_then_optimise_model(etas: Sequence[float], *, d_x: int) -> Weights:
    """Linear attention that computes Algorithm 1 and len(etas) steps of gradient descent on its result.

    The stream is [x | y | x~], 2 d_x + 1 wide. Head j of layer 0 writes r_j x_j into x~_j, where
    r_j = (1/L) sum_l x_lj y_l. Head 0 of each later layer scores <x~_k, x~_l>, reads y and writes -eta times y into
    the y slot, which then is y_k - <u_t, x~_k>; the prediction is minus the query's slot. The other heads of later
    layers are zero.

    Args:
        etas: Size of each step, unit 1/x~^2. Without steps the prediction is 0.
    Source:
        Derived here for Algorithm 1 in the form of `preprocess_then_optimise` in icl.sparse_predictors. The query's y slot
        is 0, so layer 0 needs no mask; from the second step on the query must not be a key.
    Example:
        >>> model = preprocess_then_optimise_model([0.5, 0.5], d_x=4)
        >>> [len(heads) for heads in model.heads_per_layer]
        [4, 1, 1]
    """
    n_layers, y = 1 + len(etas), d_x
    x, reweighted = slice(0, d_x), slice(d_x + 1, 2 * d_x + 1)
    wide = torch.zeros(n_layers, d_x, 2 * d_x + 1, d_x, dtype=torch.float64, device="cpu")
    W_Q, W_K, W_V, W_O = wide.clone(), wide.clone(), wide.clone(), wide.mT.contiguous()
    identity = torch.eye(d_x, dtype=torch.float64, device="cpu")
    # Undoes the division of the scores by sqrt(d_head).
    root = d_x**0.5
    W_Q[0, :, x, 0] = identity * root
    W_K[0, :, y, 0] = 1
    W_V[0, :, x, 0] = identity
    W_O[0, :, 0, reweighted] = identity
    W_Q[1:, 0, reweighted] = identity * root
    W_K[1:, 0, reweighted] = identity
    W_V[1:, 0, y, 0] = 1
    W_O[1:, 0, 0, y] = -torch.tensor(list(etas), dtype=torch.float64, device="cpu")
    W_U = torch.zeros(2 * d_x + 1, 1, dtype=torch.float64, device="cpu")
    W_U[y] = -1
    W_in = torch.eye(d_x + 1, 2 * d_x + 1, dtype=torch.float64, device="cpu")
    settings = {"scale": d_x**-0.5, "reading": (W_in, W_U)}
    return stack_of_layers(W_Q, W_K, W_V, W_O, d_y=1, score="linear/L", **settings)
