"""What TransformerLens' own tests ask of HookedTransformer and of the Bridge, on three shipped models.

Where the two differ the Bridge of 4.x decides, and HookedTransformer's way works too where it can.
"""

from collections.abc import Callable
from functools import cache as cached
from functools import partial

import pytest
import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechinterp import Prompts, load
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.hooked.checked_hooks import HookError
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.hooked.transformer_names import PROCESSING
from tests.conformance.conftest import switched_on
from tests.conftest import refused

MODELS = {
    "one layer": "softmax-h2-s0",
    "deep": "sparse-h4-noise0.1-s0",
    "merged": "linear-merged-s0",
}
N_POS = 13


@cached
def loaded(name: str) -> tuple[ICLTransformer, Prompts, Tensor]:
    checkpoint = load(f"checkpoints/{name}")
    prompts = draw_prompts(checkpoint.task, 3, context_length=N_POS - 1)
    return checkpoint.model, prompts, checkpoint.model.tokens(prompts)


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def shipped(request: pytest.FixtureRequest) -> tuple[ICLTransformer, Prompts, Tensor]:
    """A model, all of whose switches are off, three of its prompts, and their tokens."""
    loaded(request.param)[0].reset_hooks(including_permanent=True)
    return loaded(request.param)


def keep(values: Tensor, hook: HookPoint) -> Tensor:
    return values


# Hooks


def ways_to_hook(model: ICLTransformer, tokens: Tensor, name: str) -> list[Callable[[], object]]:
    hooks = [(name, keep)]
    return [
        partial(model.run_with_hooks, tokens, fwd_hooks=hooks),
        partial(model.run_with_hooks, tokens, bwd_hooks=hooks, reset_hooks_end=False),
        lambda: model.hooks(fwd_hooks=hooks).__enter__(),
        partial(model.run_with_cache, tokens, names_filter=name),
        partial(model.run_with_cache, tokens, names_filter=["blocks.0.attn.hook_z", name]),
        partial(model.add_hook, name, keep),
        partial(model.add_perma_hook, name, keep),
    ]


SWITCHED = [
    ("blocks.0.attn.hook_result", "use_attn_result"),
    ("blocks.0.hook_q_input", "use_split_qkv_input"),
    ("blocks.0.hook_attn_in", "use_attn_in"),
    ("blocks.0.hook_mlp_in", "use_hook_mlp_in"),
    ("blocks.0.hook_mlp_out", "use_zero_mlp"),
]


@pytest.mark.parametrize(("name", "switch"), SWITCHED)
def test_a_hook_on_a_point_that_is_off_says_so(shipped, name: str, switch: str):
    model, _, tokens = shipped
    check = partial(model.check_and_add_hook, model.hook_dict["hook_embed"], name, keep)
    ways = [*ways_to_hook(model, tokens, name), check]
    # HookError is all that TransformerLens 4.x and 3.x raise.
    assert {ValueError, AssertionError, KeyError} < set(HookError.__mro__)
    for way in ways:
        with refused(name, "is off", f"model.set_{switch}(True)", error=HookError):
            way()
    assert not any(point.fwd_hooks or point.bwd_hooks for point in model.hook_points())
    try:
        if name.endswith("mlp_in"):
            model.set_use_hook_mlp_in(True)
            with refused("use_zero_mlp", error=HookError):
                model.add_hook(name, keep)
            model.set_use_zero_mlp(True)
        getattr(model, f"set_{switch}")(True)
        model.add_hook(name, keep)
        _, cache = model.run_with_cache(tokens, names_filter=lambda each: each == name)
        assert list(cache) == [name]
    finally:
        model.reset_hooks()
        for each in ("use_attn_in", switch, "use_hook_mlp_in", "use_zero_mlp"):
            getattr(model, f"set_{each}")(False)


@pytest.mark.parametrize("name", ["blocks.0.attn.hook_zz", "blocks.9.hook_resid_pre", "blocks.0"])
def test_a_hook_on_a_name_that_does_not_exist_says_so(shipped, name: str):
    model, _, tokens = shipped
    for way in ways_to_hook(model, tokens, name):
        with refused(f"'{name}'", "model.hook_dict", error=HookError):
            way()
    with refused("names_filter", "a name, a list of names or a function"):
        model.run_with_cache(tokens, names_filter=3)


def test_a_function_of_names_leaves_out_what_is_off(shipped):
    model, _, tokens = shipped

    def of_queries(name: str) -> bool:
        return name.startswith("blocks.0.attn.hook_q")

    off = r"blocks.0.attn.hook_q_input .*set_use_split_qkv_input"
    with pytest.warns(UserWarning, match=off):
        _, cache = model.run_with_cache(tokens, names_filter=of_queries)
    assert list(cache) == ["blocks.0.attn.hook_q"]
    # Nothing is meant by the default, and all that is on is cached.
    _, cache = model.run_with_cache(tokens)
    assert set(cache) == {name for name in model.hook_dict if model.cfg.switch_of(name) is None}


@pytest.mark.parametrize(
    ("switch", "stem"), [("use_split_qkv_input", "hook_q_input"), ("use_attn_in", "hook_attn_in")]
)
def test_hooks_have_hooked_transformers_names_too(shipped, switch: str, stem: str):
    model, _, tokens = shipped
    older, newer = f"blocks.0.{stem}", f"blocks.0.attn.{stem}"
    plain = model(tokens)

    def half(values: Tensor, hook: HookPoint) -> Tensor:
        return values / 2

    with switched_on(model, switch):
        logits, cache = model.run_with_cache(tokens, names_filter=[older])
        both = [model.run_with_hooks(tokens, fwd_hooks=[(n, half)]) for n in (older, newer)]
    assert tuple(cache[older].shape) == (3, N_POS, model.cfg.n_heads, model.cfg.d_model)
    assert torch.allclose(logits, plain, rtol=1e-4, atol=1e-5)
    assert torch.equal(*both)
    assert not torch.allclose(both[0], plain)


# Caches


def test_gradients_are_cached(shipped):
    model, prompts, _ = shipped
    names = ["hook_embed", "blocks.0.attn.hook_z", "blocks.0.hook_resid_post"]
    loss, cache = model.run_with_cache(
        prompts, return_type="loss", incl_bwd=True, names_filter=names
    )
    assert set(cache) == {*names, *(f"{name}_grad" for name in names)}
    expected = (model.predict(prompts) - prompts.y_query).square().sum(1).mean()
    assert torch.allclose(loss, expected)
    # The gradient at the stream, by hand, from the first layer on.
    stream = cache["blocks.0.hook_resid_post"].requires_grad_()
    logits = model(stream, start_at_layer=1)
    (by_hand,) = torch.autograd.grad(model.loss_fn(logits, prompts.y_query), stream)
    assert torch.allclose(cache["blocks.0.hook_resid_post_grad"], by_hand, rtol=1e-4, atol=1e-7)
    model.zero_grad()
    with torch.no_grad(), refused("incl_bwd", "gradients"):
        model.run_with_cache(prompts, return_type="loss", incl_bwd=True)
    with refused("incl_bwd", "return_type='loss'"):
        model.run_with_cache(prompts, incl_bwd=True)


# Outputs


def test_losses_are_those_of_the_query(shipped):
    model, prompts, tokens = shipped
    logits = model(prompts)
    both, loss = model(prompts, return_type="both")
    assert torch.equal(both, logits)
    assert torch.equal(loss, model(tokens, return_type="loss", labels=prompts.y_query))
    assert torch.equal(loss, ((logits[:, -1] - prompts.y_query) ** 2).sum(1).mean())
    with refused("return_type='loss'", "labels"):
        model(tokens, return_type="loss")
    with refused("return_type", "'logits', 'loss', 'both'"):
        model(tokens, return_type="words")


# Weights


def test_composition_scores(shipped):
    model = shipped[0]
    cfg = model.cfg
    for mode in "QKV":
        scores = model.all_composition_scores(mode)
        assert scores.shape == (cfg.n_layers, cfg.n_heads, cfg.n_layers, cfg.n_heads)
        for i in range(cfg.n_layers):
            for j in range(cfg.n_layers):
                assert bool(scores[i, :, j].any()) == (i < j)
        if cfg.n_layers > 1:
            writes, last = model.OV.AB[0, 1], model.blocks[-1].attn
            reads = {"Q": last.QK.AB[2], "K": last.QK.AB[2].mT, "V": last.OV.AB[2]}[mode]
            expected = (writes @ reads).norm() / writes.norm() / reads.norm()
            assert torch.allclose(scores[0, 1, -1, 2], expected, rtol=1e-4)
    with refused("mode", "Q, K, V", "'X'"):
        model.all_composition_scores("X")


def test_weights_are_loaded_and_not_processed(shipped):
    model, prompts, _ = shipped
    before = model.predict(prompts)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.process_weights_(fold_ln=False, center_unembed=False)
    assert torch.equal(model.predict(prompts), before)
    nothing = {name: 0 * tensor for name, tensor in weights.items()}
    for name in PROCESSING:
        with refused(f"{name}=True"):
            model.process_weights_(**{name: True})
        with refused(f"{name}=True"):
            model.load_and_process_state_dict(nothing, **{name: True})
    assert torch.equal(model.predict(prompts), before)
    model.load_and_process_state_dict(nothing)
    assert not model.predict(prompts).any()
    model.load_and_process_state_dict(weights)
    assert torch.equal(model.predict(prompts), before)


SILENT = {
    "text": (lambda model, tokens: model.to_tokens("in context"), ValueError, "numbered"),
    "text to run": (lambda model, tokens: model("in context"), ValueError, "prompts"),
    "words": (lambda model, tokens: model.to_string, AttributeError, "model.tokens"),
    "mask": (
        lambda model, tokens: model(tokens, attention_mask=0 * tokens[..., 0].long()),
        ValueError,
        "attention_mask",
    ),
    "both copies": (
        lambda model, tokens: [model.set_use_attn_in(True), model.set_use_split_qkv_input(True)],
        ValueError,
        "use_attn_in",
    ),
}


@pytest.mark.parametrize(("use", "error", "word"), SILENT.values(), ids=SILENT)
def test_what_would_be_dropped_without_a_word_is_refused(use, error, word: str):
    model, _, tokens = loaded(MODELS["one layer"])
    with refused(word, error=error):
        use(model, tokens)
    model.set_use_attn_in(False)
