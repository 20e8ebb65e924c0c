"""A linear read-out that replaces the MLP behind one layer of attention.

If the prediction is nearly linear in the output of attention at the query, the heads have circuits
to the prediction: W_O times the direction of the read-out. The read-out is fitted on one half of
the prompts and scored on the other."""

from dataclasses import replace

import torch
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.weights import Weights, heads_of

N_PROMPTS, CHUNK = 1024, 64


def has_linear_way_in(weights: Weights) -> bool:
    """True if the model is one layer whose attention reads the tokens through linear maps only."""
    model = weights.model
    around = (model.norm, model.n_positions, model.d_read_in)
    plain = (around, model.layout) == ((None, None, None), "pairs")
    return model.n_layers == 1 and plain and not model.final_norm and not model.context_only


def read_through(
    weights: Weights, task: TaskConfig, *, seed: int = 0
) -> tuple[AttentionWeights, float]:
    """The attention layer followed by the linear read-out, and the R^2 of the read-out.

    R^2 is 1 - mean (prediction - read-out)^2 / variance of the prediction, on the half that was not
    fitted.

    Args:
        weights: Weights of a model that satisfies `has_linear_way_in`.
        task: Law of the prompts.
    """
    # Imported here: TransformerLens is slow to import.
    from mechinterp.models.hooked.transformer import ICLTransformer

    weights = weights.to(torch.float64)
    model = ICLTransformer.from_weights(weights, task=task)
    prompts = evaluation_prompts(task, n_prompts=N_PROMPTS, seed=seed)
    name, predicted, outputs = "blocks.0.hook_attn_out", [], []
    with torch.no_grad():
        for start in range(0, N_PROMPTS, CHUNK):  # patterns of all prompts at once are gigabytes
            some = prompts[start : start + CHUNK]
            predicted.append(model.predict(some))
            _, cache = model.run_with_cache(some.tokens, names_filter=name)
            outputs.append(cache[name][:, -1])
    prediction, written = torch.cat(predicted), torch.cat(outputs)
    half = N_PROMPTS // 2
    known = torch.cat([written, written.new_ones(N_PROMPTS, 1)], 1)
    solved = torch.linalg.pinv(known[:half], rtol=1e-8) @ prediction[:half]
    error = prediction[half:] - known[half:] @ solved
    spread = (prediction[half:] - prediction[half:].mean(0)).square().mean()
    r2 = float(1 - error.square().mean() / spread) if spread > 0 else float("nan")
    return _seen_through(weights, solved[:-1], solved[-1]), r2


def _seen_through(weights: Weights, direction: Tensor, constant: Tensor) -> AttentionWeights:
    """The attention layer on tokens (x, y), with the read-out multiplied into W_O."""
    tensors, into = weights.attention(0), weights.tensors.get("W_in")
    seen = {"W_O": tensors["W_O"] @ direction}
    for x in "QKV":
        matrix = tensors[f"W_{x}"]
        seen[f"W_{x}"] = matrix if into is None else into @ matrix
        if weights.model.biases:
            moved = weights.tensors["b_in"] @ matrix if into is not None else 0
            seen[f"b_{x}"] = tensors[f"b_{x}"] + moved
    if weights.model.biases:
        seen["b_O"] = tensors["b_O"] @ direction + constant
    # With a read-in, the keys of merged heads are no longer the tokens themselves.
    return heads_of(replace(weights.model, merged_qk=False), seen, weights.scale)
