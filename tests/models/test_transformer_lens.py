"""What TransformerLens' own tests ask of HookedTransformer and of the Bridge, on five shipped models.

Where the two differ the Bridge of 4.x decides, and HookedTransformer's way works too where it can.
"""

from collections.abc import Callable
from functools import cache as cached
from functools import partial

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache, FactoredMatrix
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.head_detector import detect_head
from transformer_lens.hook_points import HookPoint

from mechinterp import Prompts, load, sample_prompts
from mechinterp.models.hooked.config import HookedConfig
from mechinterp.models.hooked.hooks import HookError
from mechinterp.models.hooked.names import PROCESSING
from mechinterp.models.hooked.transformer import ICLTransformer
from tests.conformance.requirements import switched_on

MODELS = {
    "one layer": "softmax-h2-s0",
    "eight heads": "softmax-h8-s0",
    "deep": "sparse-h4-noise0.1-s0",
    "linear": "linear-h2-s0",
    "merged": "linear-merged-s0",
}
N_POS = 13


@cached
def loaded(name: str) -> tuple[ICLTransformer, Prompts]:
    checkpoint = load(f"checkpoints/{name}")
    return checkpoint.model, sample_prompts(checkpoint.task, 3, context_length=N_POS - 1)


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def shipped(request: pytest.FixtureRequest) -> tuple[ICLTransformer, Prompts]:
    """A model, all of whose switches are off, and three of its prompts."""
    model, prompts = loaded(request.param)
    model.reset_hooks(including_permanent=True)
    return model, prompts


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
    ("blocks.0.attn.hook_q_input", "use_split_qkv_input"),
    ("blocks.0.attn.hook_k_input", "use_split_qkv_input"),
    ("blocks.0.attn.hook_v_input", "use_split_qkv_input"),
    ("blocks.0.hook_q_input", "use_split_qkv_input"),
    ("blocks.0.attn.hook_attn_in", "use_attn_in"),
    ("blocks.0.hook_attn_in", "use_attn_in"),
    ("blocks.0.hook_mlp_in", "use_hook_mlp_in"),
    ("blocks.0.hook_mlp_out", "use_zero_mlp"),
    ("blocks.0.hook_resid_mid", "use_zero_mlp"),
]


@pytest.mark.parametrize(("name", "switch"), SWITCHED)
def test_a_hook_on_a_point_that_is_off_says_so(shipped, name: str, switch: str):
    model, prompts = shipped
    tokens = model.tokens(prompts)
    check = partial(model.check_and_add_hook, model.hook_dict["hook_embed"], name, keep)
    ways = [*ways_to_hook(model, tokens, name), check]
    # HookError is all that TransformerLens 4.x and 3.x raise.
    assert {ValueError, AssertionError} < set(HookError.__mro__)
    for way in ways:
        with pytest.raises(HookError, match=rf"{name} is off; call model.set_{switch}\(True\)"):
            way()
    assert not any(point.fwd_hooks or point.bwd_hooks for point in model.hook_points())
    try:
        if name.endswith("mlp_in"):
            model.set_use_hook_mlp_in(True)
            with pytest.raises(HookError, match="use_zero_mlp"):
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
    model, prompts = shipped
    tokens = model.tokens(prompts)
    for way in ways_to_hook(model, tokens, name):
        with pytest.raises(HookError, match=rf"^There is no hook point '{name}'; model.hook_dict"):
            way()
        with pytest.raises(KeyError):  # what TransformerLens raises
            way()
    with pytest.raises(ValueError, match=r"^names_filter must be a name, a list of names or a fun"):
        model.run_with_cache(tokens, names_filter=3)


def test_a_function_of_names_leaves_out_what_is_off(shipped):
    model, prompts = shipped
    tokens, seen = model.tokens(prompts), []

    def note(values: Tensor, hook: HookPoint) -> None:
        seen.append(hook.name)

    def of_queries(name: str) -> bool:
        return name.startswith("blocks.0.attn.hook_q")

    off = "^1 of the hook points .* blocks.0.attn.hook_q_input first; set_use_split_qkv_input"
    for use in (
        lambda: model.run_with_hooks(tokens, fwd_hooks=[(of_queries, note)]),
        lambda: model.add_hook(of_queries, note),
        lambda: model.run_with_cache(tokens, names_filter=of_queries),
    ):
        with pytest.warns(UserWarning, match=off):
            result = use()
    _, cache = result
    assert seen == ["blocks.0.attn.hook_q"] * 2
    assert list(cache) == ["blocks.0.attn.hook_q"]
    model.reset_hooks()
    # Nothing is meant by the default, and all that is on is cached.
    _, cache = model.run_with_cache(tokens)
    assert set(cache) == {name for name in model.hook_dict if model.cfg.switch_of(name) is None}


def test_hooks_have_hooked_transformers_names_too(shipped):
    model, prompts = shipped
    tokens = model.tokens(prompts)
    block = model.blocks[0]
    cfg = model.cfg
    per_head = (3, N_POS, cfg.n_heads, cfg.d_model)
    plain = model(tokens)

    def half(values: Tensor, hook: HookPoint) -> Tensor:
        return values / 2

    for switch, stems in (
        ("use_split_qkv_input", ["hook_q_input", "hook_k_input", "hook_v_input"]),
        ("use_attn_in", ["hook_attn_in"]),
    ):
        for stem in stems:
            older, newer = f"blocks.0.{stem}", f"blocks.0.attn.{stem}"
            assert getattr(block, stem) is getattr(block.attn, stem) is model.hook_dict[newer]
            with switched_on(model, switch):
                logits, cache = model.run_with_cache(tokens, names_filter=[older])
                both = [model.run_with_hooks(tokens, fwd_hooks=[(n, half)]) for n in (older, newer)]
                _, everything = model.run_with_cache(tokens)
            assert list(cache) == [older]
            assert tuple(cache[older].shape) == per_head
            assert torch.allclose(logits, plain, rtol=1e-4, atol=1e-5)
            assert torch.equal(*both)
            assert not torch.allclose(both[0], plain)
            assert everything[older] is everything[newer]
            assert everything[stem.removeprefix("hook_"), 0] is everything[newer]


def test_one_copy_of_the_input_excludes_three(shipped):
    model, _ = shipped
    both = ("use_attn_in", "use_split_qkv_input")
    for first, second in (both, both[::-1]):
        getattr(model, f"set_{first}")(True)
        with pytest.raises(ValueError, match=f"^{second} excludes {first}; turn that off first"):
            getattr(model, f"set_{second}")(True)
        getattr(model, f"set_{first}")(False)
        assert not getattr(model.cfg, second)


def test_an_edit_of_the_shared_input_reaches_query_key_and_value(shipped):
    model, prompts = shipped
    tokens = model.tokens(prompts)

    def add(values: Tensor, hook: HookPoint) -> Tensor:
        values = values.clone()
        values[:, :, 0] += 1
        return values

    names = [f"blocks.0.attn.hook_{part}" for part in ("q", "k", "v")]
    with switched_on(model, "use_attn_in"), model.hooks([("blocks.0.hook_attn_in", add)]):
        _, shared = model.run_with_cache(tokens, names_filter=names)
    _, plain = model.run_with_cache(tokens, names_filter=names)
    attn = model.blocks[0].attn
    for name, weights in zip(names, (attn.W_Q, attn.W_K, attn.W_V), strict=True):
        moved = (shared[name] - plain[name])[:, :, 0]
        assert torch.allclose(moved, weights[0].sum(0).expand_as(moved), rtol=1e-3, atol=1e-4)
        assert torch.allclose(shared[name][:, :, 1:], plain[name][:, :, 1:], rtol=1e-4, atol=1e-5)


def test_hooks_before_the_first_layer_run_stay_silent(shipped):
    model, prompts = shipped
    stream = model(model.tokens(prompts), stop_at_layer=0)
    seen = []
    hooks = [("hook_embed", lambda values, hook: seen.append(hook))]
    model.run_with_hooks(stream, start_at_layer=0, fwd_hooks=hooks)
    assert not seen


@pytest.mark.parametrize("zero_comes", ["first", "last"])
@pytest.mark.parametrize("prepend", [True, False])
def test_hooks_can_be_put_in_front(shipped, zero_comes: str, prepend: bool):
    model, prompts = shipped
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    both = [lambda values, hook: torch.zeros_like(values), lambda values, hook: values + 1]
    for hook in both if zero_comes == "first" else both[::-1]:
        model.add_hook(last, hook, prepend=prepend)
    zero_runs_last = (zero_comes == "last") != prepend
    logits = model(model.tokens(prompts))
    model.reset_hooks()
    assert torch.allclose(logits, model.b_U.expand_as(logits)) == zero_runs_last


# Caches


def test_gradients_are_cached(shipped):
    model, prompts = shipped
    tokens = model.tokens(prompts)
    names = ["hook_embed", "blocks.0.attn.hook_z", "blocks.0.hook_resid_post"]
    loss, cache = model.run_with_cache(
        tokens, return_type="loss", labels=prompts.y_query, incl_bwd=True, names_filter=names
    )
    assert isinstance(cache, ActivationCache)
    assert set(cache) == {*names, *(f"{name}_grad" for name in names)}
    assert loss.ndim == 0
    expected = (model.predict(prompts) - prompts.y_query).square().sum(1).mean()
    assert torch.allclose(loss, expected)
    # The gradient at the stream, by hand, from the first layer on.
    stream = cache["blocks.0.hook_resid_post"].requires_grad_()
    logits = model(stream, start_at_layer=1)
    (by_hand,) = torch.autograd.grad(model.loss_fn(logits, prompts.y_query), stream)
    assert torch.allclose(cache["blocks.0.hook_resid_post_grad"], by_hand, rtol=1e-4, atol=1e-7)
    model.zero_grad()
    # Prompts know their y_query.
    again, everything = model.run_with_cache(prompts, return_type="loss", incl_bwd=True)
    assert torch.equal(again, loss)
    assert torch.equal(everything["embed_grad"], cache["hook_embed_grad"])
    assert all(torch.isfinite(values).all() for n, values in everything.items() if "grad" in n)
    model.zero_grad()
    refused = pytest.raises(ValueError, match=r"^incl_bwd needs gradients, which are off")
    with torch.no_grad(), refused:
        model.run_with_cache(prompts, return_type="loss", incl_bwd=True)
    for arguments in ({}, {"return_type": "loss", "stop_at_layer": 1}):
        with pytest.raises(ValueError, match=r"^incl_bwd needs return_type='loss' and no stop_at"):
            model.run_with_cache(prompts, incl_bwd=True, **arguments)


def test_slices_of_positions_are_positions(shipped):
    model, prompts = shipped
    tokens = model.tokens(prompts)
    with switched_on(model, "use_split_qkv_input", "use_attn_result"):
        _, whole = model.run_with_cache(tokens)
        _, last = model.run_with_cache(tokens, pos_slice=-1)
        _, one = model.run_with_cache(tokens[:1], pos_slice=(2, 4), remove_batch_dim=True)
    for name, values in whole.items():
        of_queries = name.endswith(("pattern", "attn_scores"))
        chosen = values[:, :, -1:] if of_queries else values[:, -1:]
        assert torch.equal(last[name], chosen), name
        chosen = values[0, :, 2:4] if of_queries else values[0, 2:4]
        assert one[name].shape == chosen.shape, name


# Outputs


def test_losses_are_those_of_the_query(shipped):
    model, prompts = shipped
    tokens = model.tokens(prompts)
    logits = model(prompts)
    assert torch.equal(logits, model(tokens))
    both, loss = model(prompts, return_type="both")
    assert torch.equal(both, logits)
    assert torch.equal(loss, model(tokens, return_type="loss", labels=prompts.y_query))
    assert torch.equal(loss, ((logits[:, -1] - prompts.y_query) ** 2).sum(1).mean())
    assert model(prompts, return_type=None) is None
    needs = r"^return_type='{}' needs labels=prompts.y_query, which tokens do not hold"
    for kind in ("loss", "both"):
        with pytest.raises(ValueError, match=needs.format(kind)):
            model(tokens, return_type=kind)
    with pytest.raises(ValueError, match=r"^return_type must be 'logits', 'loss', 'both' or None"):
        model(tokens, return_type="words")


def test_a_mask_that_masks_nothing_is_taken(shipped):
    model, prompts = shipped
    tokens = model.tokens(prompts)
    mask = torch.ones(tokens.shape[:2], dtype=torch.long)
    assert torch.equal(model(tokens, attention_mask=mask), model(tokens))
    mask[0, 0] = 0
    with pytest.raises(ValueError, match=r"^attention_mask must be 1 everywhere, prompts have no"):
        model(tokens, attention_mask=mask)


# Weights


def test_composition_scores(shipped):
    model, _ = shipped
    cfg = model.cfg
    for mode in "QKV":
        scores = model.all_composition_scores(mode)
        assert scores.shape == (cfg.n_layers, cfg.n_heads, cfg.n_layers, cfg.n_heads)
        assert scores.head_labels == model.all_head_labels
        assert scores.layer_indices == list(range(cfg.n_layers))
        for i in range(cfg.n_layers):
            for j in range(cfg.n_layers):
                assert bool(scores[i, :, j].any()) == (i < j)
        if cfg.n_layers > 1:
            writes, last = model.OV.AB[0, 1], model.blocks[-1].attn
            reads = {"Q": last.QK.AB[2], "K": last.QK.AB[2].mT, "V": last.OV.AB[2]}[mode]
            expected = (writes @ reads).norm() / writes.norm() / reads.norm()
            assert torch.allclose(scores[0, 1, -1, 2], expected, rtol=1e-4)
    with pytest.raises(ValueError, match=r"^mode must be one of Q, K, V, got 'X'"):
        model.all_composition_scores("X")


def test_circuits_of_a_layer(shipped):
    model, _ = shipped
    for layer, block in enumerate(model.blocks):
        for name in ("QK", "OV"):
            of_layer = getattr(block.attn, name)
            assert isinstance(of_layer, FactoredMatrix)
            assert torch.equal(of_layer.AB, getattr(model, name)[layer].AB)


def test_head_labels_are_a_list_and_a_function(shipped):
    model, _ = shipped
    cfg = model.cfg
    expected = [f"L{i}H{j}" for i in range(cfg.n_layers) for j in range(cfg.n_heads)]
    assert model.all_head_labels == expected
    assert model.all_head_labels() == expected
    assert isinstance(model.all_head_labels, list)


def test_settings_have_transformer_lens_names(shipped):
    model, prompts = shipped
    cfg = model.cfg
    assert cfg.attn_scale == 1 / cfg.scale
    assert cfg.use_attn_scale is True
    assert cfg.attention_dir == ("bidirectional" if cfg.model.context_only else "causal")
    assert (cfg.act_fn, cfg.d_mlp, cfg.use_attn_in) == (None, None, False)
    q, k = (model.run_with_cache(prompts)[1][name, 0] for name in ("q", "k"))
    scores = model.run_with_cache(prompts)[1]["attn_scores", 0][:, 0, -1, 0]
    divided = (q[:, -1, 0] * k[:, 0, 0]).sum(-1) / cfg.attn_scale
    assert torch.allclose(scores, divided, rtol=1e-4, atol=1e-6)
    hidden = [p.numel() for name, p in model.named_parameters() if ".attn.W_" in name]
    assert cfg.n_params == sum(hidden)
    assert model.n_params_total == sum(p.numel() for p in model.parameters()) >= cfg.n_params
    assert type(model.n_params_total) is int


def test_settings_go_to_a_dict_and_back(shipped):
    model, _ = shipped
    settings = model.cfg.to_dict()
    again = HookedConfig.from_dict(settings)
    assert again.to_dict() == settings
    assert settings["d_model"] == model.cfg.d_model
    assert again.model == model.cfg.model
    with pytest.raises(ValueError, match=r"^settings must have model, d_y, scale, n_ctx, got none"):
        HookedConfig.from_dict({"d_x": 5})
    # TransformerLens' own config takes the names it knows.
    upstream = TransformerBridgeConfig.from_dict(settings)
    for name in ("n_layers", "n_heads", "d_model", "d_head", "n_ctx", "attn_only"):
        assert getattr(upstream, name) == getattr(model.cfg, name)


def test_processing_leaves_the_weights_as_they_are(shipped):
    model, prompts = shipped
    before = model.predict(prompts)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.process_weights_(fold_ln=False, center_unembed=False)
    model.load_and_process_state_dict(weights, fold_ln=False, center_writing_weights=False)
    assert torch.equal(model.predict(prompts), before)
    model.load_and_process_state_dict({name: 0 * tensor for name, tensor in weights.items()})
    assert not model.predict(prompts).any()
    model.load_and_process_state_dict(weights)
    assert torch.equal(model.predict(prompts), before)


@pytest.mark.parametrize("name", PROCESSING)
def test_processing_that_is_asked_for_is_refused_and_not_dropped(name: str, shipped):
    model, prompts = shipped
    before, weights = model.predict(prompts), model.state_dict()
    refused = rf"^weights are not processed: fold_ln, .* left out, got {name}=True\.$"
    with pytest.raises(ValueError, match=refused):
        model.process_weights_(**{name: True})
    nothing = {each: 0 * tensor for each, tensor in weights.items()}
    with pytest.raises(ValueError, match=refused):
        model.load_and_process_state_dict(nothing, **{name: True})
    assert torch.equal(model.predict(prompts), before)
    if hasattr(model, name):
        with pytest.raises(ValueError, match=rf"got {name}\.$"):
            getattr(model, name)(weights)
    with pytest.raises(ValueError, match=r"got fold_norms=False\.$"):
        model.process_weights_(fold_norms=False)


# Tokens


def test_prompts_of_vectors_have_their_positions_counted(shipped):
    from transformer_lens import patching

    model, prompts = shipped
    tokens = model.tokens(prompts)
    with model.numbered(prompts) as (ids,):
        assert tuple(ids.shape) == (3, N_POS)
        assert torch.equal(model(ids), model(tokens))
    assert not len(model._table)
    ids, others = model.to_tokens(prompts), model.to_tokens(tokens.flip(0))
    assert torch.equal(model.to_tokens(ids), ids)
    assert torch.equal(model(ids), model(tokens))
    assert torch.equal(model(others), model(tokens.flip(0)))

    def metric(logits: Float[Tensor, "batch pos d_y"]) -> Tensor:
        return logits[:, -1, 0].mean()

    with torch.no_grad():
        _, cache = model.run_with_cache(ids)
        patched = patching.get_act_patch_resid_pre(model, others, cache, metric)
        assert tuple(patched.shape) == (model.cfg.n_layers, N_POS)
        # The detector asks for the tokens of what it is given: vectors will do.
        scores = detect_head(model, tokens[:1], "previous_token_head")
    assert tuple(scores.shape) == (model.cfg.n_layers, model.cfg.n_heads)
    with pytest.raises(ValueError, match=r"^numbers must be those of to_tokens or `with model\.n"):
        model(others + 3 * N_POS)
    model._table = model._table[:0]


@pytest.mark.parametrize("text", ["in context", ["in", "context"], None])
def test_text_is_refused_with_the_way_that_works(shipped, text: object):
    model, _ = shipped
    with pytest.raises(ValueError, match=r"^There is no text to read: to_tokens and numbered take"):
        model.to_tokens(text)
    for use in (model, model.run_with_cache):
        with pytest.raises(ValueError, match=r"^There is no text to read: input must be prompts,"):
            use(text)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("W_E", "W_in"),
        ("W_pos", "n_positions"),
        ("W_E_pos", "pos_embed.W_pos"),
        ("tokenizer", "numbered"),
        ("to_string", "model.tokens"),
        ("to_str_tokens", "model.tokens"),
        ("to_single_token", "numbered from 0"),
        ("to_single_str_token", "numbered from 0"),
        ("get_token_position", "the query is the last"),
        ("generate", "predict"),
    ],
)
def test_what_is_made_of_words_is_refused_with_the_way_that_works(shipped, name: str, way: str):
    model, _ = shipped
    with pytest.raises(AttributeError, match=rf"^There is no {name}: .*{way}[^\n]*$"):
        getattr(model, name)
    assert not hasattr(model, name)
