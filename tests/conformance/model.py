"""Checks of a hooked model by itself: masks, hooks, caches, ablations, and decompositions that must add up.

Each check takes any module and raises with a reason if it fails. All use the same random prompts: clean and
corrupted vectors of the model's width.
"""

from functools import partial

import torch
from torch import Tensor
from transformer_lens import ActivationCache

from tests.conformance.requirements import (
    BATCH,
    Check,
    Module,
    read_out,
    replace_at,
    require,
    require_close,
    require_sum,
    sample_inputs,
    switched_on,
)

SETTINGS = (
    *("n_layers", "n_heads", "d_model", "d_vocab", "n_ctx", "device", "dtype", "attn_only"),
    *("normalization_type", "n_key_value_heads"),
    *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in"),
)


def has_settings(model: Module) -> None:
    """`model.cfg` has the settings that TransformerLens' tools read."""
    missing = [name for name in SETTINGS if not hasattr(model.cfg, name)]
    require(not missing, f"cfg lacks {', '.join(missing)}")


def is_in_evaluation_mode(model: Module) -> None:
    """No submodule is in training mode, which TransformerLens' patching refuses."""
    modes = [module.training for module in model.modules()]
    require(not any(modes), "a submodule is in training mode: call model.eval()")


def leaves_input_alone(model: Module) -> None:
    """A hook that writes in place does not change the caller's input."""
    inputs, _ = sample_inputs(model)
    before, seen = inputs.clone(), []

    def is_entry(name: str) -> bool:
        return name.endswith(("hook_embed", "hook_resid_pre"))

    def overwrite(values: Tensor, hook: object) -> None:
        seen.append(hook)
        values[:] = 7

    with torch.no_grad():
        model.run_with_hooks(inputs, fwd_hooks=[(is_entry, overwrite)])
    require(bool(seen), "no hook fired")
    require(torch.equal(inputs, before), "a hook that writes in place overwrote the caller's input")


def caches_activations(model: Module) -> None:
    """`run_with_cache` gives an ActivationCache with the axes and filters of HookedTransformer."""
    inputs, _ = sample_inputs(model)
    cfg, n_pos = model.cfg, inputs.shape[1]
    logits, cache = model.run_with_cache(inputs)
    require(isinstance(cache, ActivationCache), f"run_with_cache gives a {type(cache).__name__}")
    require(torch.equal(logits, model(inputs)), "the output with a cache differs from that without")
    head_rows = (BATCH, n_pos, cfg.n_heads)
    for name in "qkvz":
        shape = list(cache[name, 0].shape[:-1])
        require(shape == list(head_rows), f"hook_{name}[..., 0] has shape {shape}")
    shape = list(cache["pattern", 0].shape)
    is_square = shape == [BATCH, cfg.n_heads, n_pos, n_pos]
    require(is_square, "hook_pattern is not [batch, head, query, key]")
    names = {f"blocks.{layer}.attn.hook_z" for layer in range(cfg.n_layers)}
    _, one = model.run_with_cache(inputs[:1], names_filter=list(names), remove_batch_dim=True)
    require(names <= set(one.keys()), "names_filter keeps back what it names")
    require("blocks.0.attn.hook_pattern" not in one, "names_filter lets other names through")
    require(one["z", 0].ndim == 3, "remove_batch_dim left the batch axis")


def runs_hooks(model: Module) -> None:
    """`run_with_hooks` applies a hook and removes it afterwards."""
    inputs, _ = sample_inputs(model)
    before = model(inputs)
    hook = ("blocks.0.hook_attn_out", replace_at((slice(None),), 1.0))
    changed = model.run_with_hooks(inputs, fwd_hooks=[hook])
    require(not torch.equal(changed, before), "a hook on hook_attn_out changes nothing")
    require(torch.equal(model(inputs), before), "a hook is still there after run_with_hooks")
    with model.hooks(fwd_hooks=[hook]):
        require(torch.equal(model(inputs), changed), "model.hooks differs from run_with_hooks")
    require(torch.equal(model(inputs), before), "a hook is still there after model.hooks")


def drops_hooks_after_an_exception(model: Module) -> None:
    """A hook that raises an exception is removed afterwards."""
    inputs, _ = sample_inputs(model)

    def stop(values: Tensor, hook: object) -> None:
        raise InterruptedError

    name = "blocks.0.hook_resid_pre"
    left = len(model.hook_dict[name].fwd_hooks)
    try:
        model.run_with_hooks(inputs, fwd_hooks=[(name, stop)])
    except InterruptedError:
        left = len(model.hook_dict[name].fwd_hooks) - left
        if left:
            model.hook_dict[name].remove_hooks()
        require(left == 0, "a hook is still there after an exception")
        return
    raise AssertionError("hook_resid_pre does not fire")


def masks_strictly(model: Module) -> None:
    """Each position reads earlier positions only, unless `cfg` allows itself or both sides.

    With `context_only` all positions read everything except the query; with `attend_to_self` the query, too.
    """
    inputs, _ = sample_inputs(model)
    logits, cache = model.run_with_cache(inputs)
    settings = getattr(model.cfg, "model", model.cfg)
    both_sides = getattr(settings, "context_only", False)
    itself = getattr(settings, "attend_to_self", False)
    for layer in range(model.cfg.n_layers):
        pattern = cache["pattern", layer]
        if both_sides:
            at_query = pattern[..., -1].any().item()
            require(itself or not at_query, f"layer {layer} attends to the query")
        else:
            require(not pattern.triu(1).any().item(), f"layer {layer} attends to later positions")
            diagonal = pattern.diagonal(dim1=-2, dim2=-1).any().item()
            require(itself or not diagonal, f"positions of layer {layer} attend to themselves")
        require(pattern[..., -1, :-1].any().item(), f"the query of layer {layer} reads nothing")
        reads_itself = pattern[..., -1, -1].any().item()
        require(not itself or reads_itself, f"the query of layer {layer} does not read itself")
    if both_sides and itself:
        return
    later = inputs.clone()
    later[:, -1] += 1
    require_close(model(later)[:, :-1], logits[:, :-1], "outputs before a token that was changed")


def acts_on_scores(model: Module) -> None:
    """An edit of the scores changes the pattern, and a row without keys gives no NaN."""
    inputs, _ = sample_inputs(model)
    caches = {}
    for rows in (slice(1, None), slice(None)):
        mask = replace_at((..., rows, slice(0, 2 if rows.start is None else 1)), -torch.inf)
        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", mask)]):
            _, caches[rows.start] = model.run_with_cache(inputs)
    first_key = caches[1]["pattern", 0][..., 0]
    require(not first_key[..., 1:].any().item(), "an edit of hook_attn_scores has no effect")
    every_z = (caches[None]["z", layer] for layer in range(model.cfg.n_layers))
    finite = all(torch.isfinite(z).all() for z in every_z)
    require(finite, "a row whose keys are all masked gives NaN")


def has_finite_gradients(model: Module) -> None:
    """Gradients are finite everywhere, including the scores of the first row."""
    inputs, _ = sample_inputs(model)
    names = [f"blocks.0.attn.hook_{name}" for name in ("attn_scores", "pattern")]
    parameters = dict(model.named_parameters())
    gradients_by_name: dict[str, Tensor] = {}

    def keep(gradient: Tensor, hook: Module) -> None:
        gradients_by_name[hook.name] = gradient.detach().clone()

    inputs.requires_grad_()
    with model.hooks(bwd_hooks=[(name, keep) for name in names]):
        loss = model(inputs).square().sum()
        # Not loss.backward(), which would add to the parameters' own gradients.
        gradients = torch.autograd.grad(loss, [inputs, *parameters.values()], allow_unused=True)
    named = zip(["input", *parameters], gradients, strict=True)
    gradients_by_name |= {name: gradient for name, gradient in named if gradient is not None}
    missing = [name for name in (*names, "input") if name not in gradients_by_name]
    require(not missing, f"no gradient at {', '.join(missing)}")
    finite = {name: gradient.isfinite().all() for name, gradient in gradients_by_name.items()}
    broken = [name for name, holds in finite.items() if not holds]
    require(not broken, f"the gradient is not finite at {', '.join(broken)}")


def ablates_heads(model: Module) -> None:
    """Masking hook_z, masking hook_result and zeroing W_O give the same result for every head."""
    inputs, _ = sample_inputs(model)
    full, moved = model(inputs), 0.0
    for layer in range(model.cfg.n_layers):
        W_O = model.blocks[layer].attn.W_O
        for head in range(model.cfg.n_heads):
            hook = replace_at((slice(None), slice(None), head), 0.0)
            at_z = model.run_with_hooks(inputs, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", hook)])
            with switched_on(model, "use_attn_result"):
                hooks = [(f"blocks.{layer}.attn.hook_result", hook)]
                at_result = model.run_with_hooks(inputs, fwd_hooks=hooks)
            with torch.no_grad():
                kept = W_O[head].clone()
                W_O[head] = 0
                zeroed = model(inputs)
                W_O[head] = kept
            require_close(at_result, at_z, f"L{layer}H{head} masked at hook_result and at hook_z")
            require_close(zeroed, at_z, f"L{layer}H{head} with W_O zero and masked at hook_z")
            moved = max(moved, (at_z - full).abs().max().item())
    require(moved > 0, "masking changes nothing: no head writes to the prediction")


def decomposes_the_residual_stream(model: Module) -> None:
    """The parts of the residual stream sum to the stream that the output is read from."""
    require_sum(model)
    inputs, _ = sample_inputs(model)
    logits, cache = model.run_with_cache(inputs)
    parts = cache.decompose_resid().sum(0)
    require_close(read_out(model, parts), logits, "decompose_resid")
    stream = cache.accumulated_resid()
    require_close(read_out(model, stream[-1]), logits, "accumulated_resid")
    decompose = partial(cache.get_full_resid_decomposition, expand_neurons=False)
    require_close(read_out(model, decompose().sum(0)), logits, "get_full_resid_decomposition")
    projected = decompose(project_output_onto=model.W_U)
    require_close(projected.sum(0), stream[-1] @ model.W_U, "project_output_onto")


def decomposes_into_heads(model: Module) -> None:
    """Head results and the remainder sum to the output, and so do their attributions.

    With a last norm the attributions are those of the stream after centring and division by the norm's scale.
    """
    require_sum(model)
    inputs, _ = sample_inputs(model)
    logits, cache = model.run_with_cache(inputs)
    heads, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    n_heads = model.cfg.n_layers * model.cfg.n_heads
    require(len(labels) == n_heads + 1, f"{len(labels)} parts for {n_heads} heads and a remainder")
    stream = heads.sum(0)
    require_close(read_out(model, stream), logits, "heads and remainder")
    scale = "ln_final.hook_scale"
    if model.cfg.normalization_type is None:
        expected = logits[..., 0] - model.b_U[0]
    else:
        reason = "does not apply: logit_attrs divides by the scale of a last norm, of which there is none"
        require(scale in cache.cache_dict, reason)
        centred = stream - stream.mean(-1, keepdim=True)
        expected = centred / cache[scale] @ model.W_U[:, 0]
    require_close(cache.logit_attrs(heads, tokens=0).sum(0), expected, "logit_attrs")


def reads_layers_by_logit_lens(model: Module) -> None:
    """The last entry of the logit lens is the output."""
    require_sum(model)
    inputs, _ = sample_inputs(model)
    logits, cache = model.run_with_cache(inputs)
    require_close(cache.logit_lens(positions=None).values[-1], logits, "the last entry of the lens")


CHECKS: dict[str, Check] = {
    "settings in cfg": has_settings,
    "evaluation mode": is_in_evaluation_mode,
    "caller's input untouched": leaves_input_alone,
    "caches": caches_activations,
    "hooks": runs_hooks,
    "no hook left after an exception": drops_hooks_after_an_exception,
    "strict mask": masks_strictly,
    "edits of the scores": acts_on_scores,
    "finite gradients": has_finite_gradients,
    "ablation of heads": ablates_heads,
    "decomposition of the residual stream": decomposes_the_residual_stream,
    "decomposition into heads, logit_attrs": decomposes_into_heads,
    "logit lens": reads_layers_by_logit_lens,
}
