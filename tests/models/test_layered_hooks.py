"""Hooks of models with norms, MLPs and positions: HookedTransformer's names and shapes, and what passes them.

A Bridge around the published GPT-2 says the same, and parts of the stream add up to the prediction.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mechinterp import load
from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.hooked.config import SWITCHES
from mechinterp.models.hooked.runner import HookedPredictor, masked
from mechinterp.models.hooked.transformer import ICLTransformer, hook_map
from mechinterp.models.layers import interleaved
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import CHECKPOINTS, assert_close_to_rounding
from tests.deep_models import GPT2, gpt2_predictor
from tests.models.test_layered_models import (
    TASK,
    GargModel,
    garg,
    read_gpt2,
)


@pytest.fixture
def some_prompts() -> Prompts:
    return draw_prompts(TASK, 12, dtype=torch.float64)


@pytest.fixture
def published() -> GargModel:
    return garg().double()


@pytest.fixture(scope="module")
def gpt2() -> Checkpoint:
    return read_gpt2(garg().double().state_dict())


def random_model(**architecture: object) -> ICLTransformer:
    """Two layers of three heads for d_x = 3, d_y = 2, whose every parameter is random, in float64."""
    config = ModelConfig(n_layers=2, n_heads=3, d_head=4, **architecture)
    model = ICLTransformer(config, d_x=3, d_y=2, n_ctx=20).double()
    generator = generator_for(6, "init", 0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith(".w")), std=0.4, generator=generator)
    return model.eval()


GPT2_LIKE = {**GPT2, "n_positions": 13}
PRE_NORM = {"norm": "before", "final_norm": True, "d_mlp": 7}
POST_NORM = {"norm": "after", "d_mlp": 7, "biases": True, "context_only": True}
LAYERED = {"gpt2-like": GPT2_LIKE, "pre-norm": PRE_NORM, "post-norm": POST_NORM}
EACH = pytest.mark.parametrize("architecture", [{}, *LAYERED.values()], ids=["plain", *LAYERED])


def drawn(model: ICLTransformer, n_prompts: int = 6) -> Prompts:
    """Prompts of 6 pairs for a model with d_x = 3, d_y = 2."""
    return draw_prompts(replace(TASK, d_y=2), n_prompts, seed=1, dtype=model.cfg.dtype)


@pytest.mark.slow
@EACH
def test_hook_map_is_what_a_cache_holds(architecture: dict):
    model = random_model(**architecture)
    frame = hook_map(model).set_index("name")
    assert list(frame.index) == list(model.hook_dict)
    inputs = model.tokens(drawn(model))
    sizes = {"batch": 6, "pos": inputs.shape[1]}
    seen: set[str] = set()
    for switch in ("", *SWITCHES):
        if switch:
            model.set_use_attn_in(False)  # the copies of the heads' input go one without the other
            getattr(model, f"set_{switch}")(True)
        _, cache = model.run_with_cache(inputs)
        held = set(cache) & model.hook_dict.keys()  # HookedTransformer's other names aside
        for name in held - seen:
            assert frame.loc[name, "switch"] == (switch and f"set_{switch}"), name
            shape = [sizes.get(size, size) for size in frame.loc[name, "shape"]]
            assert shape == list(cache[name].shape), name
        seen |= held
    assert seen == set(frame.index)


def test_what_passes_the_hooks_of_a_gpt2_is_what_the_published_code_computes(
    published: GargModel, gpt2: Checkpoint, some_prompts: Prompts
):
    passed: dict[str, Tensor] = {}

    def keep(name: str, part: nn.Module, *, before: bool = False) -> None:
        def hook(module: nn.Module, inputs: tuple, output: object = None) -> None:
            values = inputs[0] if before else output
            passed[name] = values[0] if isinstance(values, tuple) else values

        _ = part.register_forward_pre_hook(hook) if before else part.register_forward_hook(hook)

    backbone = published._backbone
    keep("hook_embed", published._read_in)
    keep("hook_pos_embed", backbone.wpe)
    keep("ln_final.hook_normalized", backbone.ln_f)
    for layer, block in enumerate(backbone.h):
        keep(f"blocks.{layer}.hook_resid_pre", block, before=True)
        keep(f"blocks.{layer}.ln1.hook_normalized", block.ln_1)
        keep(f"blocks.{layer}.hook_attn_out", block.attn)
        keep(f"blocks.{layer}.hook_resid_mid", block.ln_2, before=True)
        keep(f"blocks.{layer}.ln2.hook_normalized", block.ln_2)
        keep(f"blocks.{layer}.mlp.hook_pre", block.mlp.c_fc)
        keep(f"blocks.{layer}.mlp.hook_post", block.mlp.c_proj, before=True)
        keep(f"blocks.{layer}.hook_mlp_out", block.mlp)
        keep(f"blocks.{layer}.hook_resid_post", block)
    with torch.no_grad():
        backbone(inputs_embeds=published._read_in(interleaved(some_prompts)))
        _, cache = gpt2.model.run_with_cache(gpt2.model.tokens(some_prompts))
    assert len(passed) == 3 + 3 * 9
    for name, expected in passed.items():
        assert_close_to_rounding(cache[name], expected.expand_as(cache[name]))
    for layer, block in enumerate(backbone.h):
        for at, part in (("pre", block.ln_1), ("mid", block.ln_2)):
            stream = cache[f"resid_{at}", layer]
            spread = (stream.var(-1, unbiased=False, keepdim=True) + part.eps).sqrt()
            norm = "ln1" if at == "pre" else "ln2"
            assert_close_to_rounding(cache[f"blocks.{layer}.{norm}.hook_scale"], spread)


def bridge_of(published: GargModel) -> HookedPredictor:
    parts = copy.deepcopy(published)
    return gpt2_predictor(parts._backbone, parts._read_in, parts._read_out)


@pytest.mark.slow
def test_a_bridge_says_the_same(published: GargModel, gpt2: Checkpoint, some_prompts: Prompts):
    bridge = predictor_of(bridge_of(published))
    masks = [[], [(0, 2)], [(1, 0), (2, 3)]]
    for method in ("zero", "mean", "resample"):
        expected = bridge.run(some_prompts, masks, method=method)
        assert_close_to_rounding(gpt2.predictor.run(some_prompts, masks, method=method), expected)
    places = [-1, -2, -13]
    expected = bridge.streams(some_prompts, positions=places)
    assert_close_to_rounding(gpt2.predictor.streams(some_prompts, positions=places), expected)
    rise = ablate(gpt2, some_prompts, what="heads").rise
    assert rise == pytest.approx(
        ablate(bridge, some_prompts, what="heads").rise, rel=1e-6, abs=1e-9
    )


@EACH
def test_layers_start_and_stop_where_they_are_told(architecture: dict):
    model = random_model(**architecture)
    tokens = model.tokens(drawn(model))
    whole, cache = model.run_with_cache(tokens)
    after = "hook_normalized_resid_post" if architecture is POST_NORM else "hook_resid_post"
    assert torch.equal(model(tokens, stop_at_layer=0), cache["resid_pre", 0])
    between = model(tokens, stop_at_layer=1)
    assert torch.equal(between, cache["blocks.1.hook_resid_pre"])
    assert torch.equal(between, cache[f"blocks.0.{after}"])
    assert torch.equal(model(between, start_at_layer=1), whole)
    last = model(between, start_at_layer=1, stop_at_layer=2)
    assert torch.equal(last, cache[f"blocks.1.{after}"])
    assert torch.equal(model(last, start_at_layer=2), whole)


@EACH
@pytest.mark.filterwarnings("ignore:.*hook points picked are switched off")
def test_hooks_change_neither_the_callers_tokens_nor_what_comes_after(architecture: dict):
    model = random_model(**architecture)
    for switch in ("attn_result", "split_qkv_input", "zero_mlp", "hook_mlp_in"):
        getattr(model, f"set_use_{switch}")(True)
    prompts = drawn(model)
    tokens = model.tokens(prompts)
    stream, weights = model(tokens, stop_at_layer=0), copy.deepcopy(model.state_dict())
    kept, before = (tokens.clone(), stream.clone()), model.predict(prompts)
    with torch.no_grad(), model.hooks(fwd_hooks=[(lambda name: True, _overwrite)]):
        assert not torch.equal(model(tokens)[:, -1], before)
        model(tokens[:1])  # of one prompt, what is the same for all prompts is no copy by itself
        for layer in (0, 1):
            model(stream, start_at_layer=layer)
    assert torch.equal(tokens, kept[0])
    assert torch.equal(stream, kept[1])
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    with masked(model, [(0, 0), (1, 1)]):
        inside = model.predict(prompts)
    assert (inside - before).abs().max() > 1e-3
    assert torch.equal(model.predict(prompts), before)


def _overwrite(values: Tensor, hook: object) -> None:
    values[:] = 7


@EACH
def test_an_edit_of_one_split_input_is_what_the_norm_and_the_head_read(architecture: dict):
    model = random_model(**architecture)
    tokens = model.tokens(drawn(model))
    plain, before = model.run_with_cache(tokens)
    model.set_use_split_qkv_input(True)
    assert_close_to_rounding(model(tokens), plain)
    shift = torch.linspace(-1, 2, model.cfg.d_model, dtype=torch.float64)

    def add(values: Tensor, hook: object) -> None:
        values[:, :, 1] += shift

    with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.1.attn.hook_q_input", add)]):
        _, cache = model.run_with_cache(tokens)
    block, resid = model.blocks[1], before["resid_pre", 1] + shift
    read = block.ln1(resid) if model.cfg.model.norm == "before" else resid
    bias = block.attn.b_Q[1] if model.cfg.model.biases else 0
    assert_close_to_rounding(cache["q", 1][:, :, 1], read @ block.attn.W_Q[1] + bias)
    for head in (0, 2):
        assert_close_to_rounding(cache["q", 1][:, :, head], before["q", 1][:, :, head])
    for name in ("k", "v"):
        assert_close_to_rounding(cache[name, 1], before[name, 1])


# The model as nn.Linear.

AS_LINEAR = {
    "attention alone": {},
    "linear scores": {"score": "linear/L", "context_only": True},
    "merged": {"score": "linear/L", "merged_qk": True, "d_model": 4},
    **LAYERED,
    "rotary": {"layout": "in_turn", "rotary_dim": 4, "d_model": 8},
    "read-in of two layers": {"d_read_in": 5, "d_model": 8},
}


@pytest.mark.parametrize("kind", AS_LINEAR)
def test_the_model_as_linear_modules_predicts_the_same(kind: str):
    model = random_model(**AS_LINEAR[kind])
    module = model.as_linear_module()
    prompts = draw_prompts(TaskConfig(d_x=3, d_y=2, context_length=6), 7, dtype=torch.float64)
    with torch.no_grad():
        assert_close_to_rounding(module(prompts), model(model.tokens(prompts)))
    names = {
        name.split(".")[-1] for name, each in module.named_modules() if type(each) is nn.Linear
    }
    assert {"q", "k", "v", "o"} <= names
    assert not {"ln1.w", "W_Q"} & {name for name, _ in module.named_parameters()}


def test_weights_and_gradients_of_linear_modules_are_the_models():
    model = load(CHECKPOINTS / "softmax-h2-s0").model
    module = model.as_linear_module()
    prompts = draw_prompts(TaskConfig(), 32)
    torch.testing.assert_close(module(prompts)[:, -1], model.predict(prompts))
    loss = model.loss_fn(module(prompts), prompts.y_query)
    loss.backward()
    grad = module.blocks[0].attn.q.weight.grad
    model(prompts, return_type="loss").backward()
    expected = model.blocks[0].attn.W_Q.grad.permute(1, 0, 2).flatten(1).mT
    torch.testing.assert_close(grad, expected)
    # A copy: the module does not change the model.
    assert module.blocks[0].attn.q.weight.data_ptr() != model.W_Q.data_ptr()
