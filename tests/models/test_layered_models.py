"""Layered models agree with the published code and with torch's own modules, masked heads too."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.layered import LayeredModel, LayerLaw, encoder_model, gpt2_model

TASK = TaskConfig(d_x=3, context_length=6, beta_var=1.0, noise_var=0.0)


class GargModel(nn.Module):
    """Garg et al.'s TransformerModel, as published."""

    def __init__(self, n_dims: int, n_positions: int, *, n_embd=16, n_layer=3, n_head=4):
        super().__init__()
        configuration = GPT2Config(
            n_positions=2 * n_positions,
            n_embd=n_embd,
            n_layer=n_layer,
            n_head=n_head,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            initializer_range=0.3,
        )
        self._read_in = nn.Linear(n_dims, n_embd)
        self._backbone = GPT2Model(configuration)
        self._read_out = nn.Linear(n_embd, 1)

    @staticmethod
    def _combine(xs_b: Tensor, ys_b: Tensor) -> Tensor:
        bsize, points, dim = xs_b.shape
        ys_b_wide = torch.cat((ys_b.view(bsize, points, 1), torch.zeros(bsize, points, dim - 1)), 2)
        return torch.stack((xs_b, ys_b_wide), dim=2).view(bsize, 2 * points, dim)

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        embeds = self._read_in(self._combine(xs, ys))
        output = self._backbone(inputs_embeds=embeds).last_hidden_state
        return self._read_out(output)[:, ::2, 0]

    def at_query(self, prompts: Prompts) -> Tensor:
        """The prediction at the last x, which its own y, unknown to us, comes after."""
        xs = torch.cat([prompts.x, prompts.x_query[:, None]], 1)
        ys = torch.cat([prompts.y, torch.full_like(prompts.y[:, :1], 7.0)], 1)[..., 0]
        with torch.no_grad():
            return self(xs, ys)[:, -1:]


def garg(**sizes: int) -> GargModel:
    """A Garg model with weights of a fixed seed, large enough that every part counts."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = GargModel(3, 10, **sizes).eval()
        for name, parameter in model.named_parameters():
            if "ln_" in name or name.endswith("bias"):
                nn.init.normal_(parameter, 0.5, 0.3)
    return model


def encoder(width: int, **settings) -> nn.TransformerEncoder:
    """Two encoder layers with weights of a fixed seed, no parameter at 0 or 1."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        layer = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.2, batch_first=True, **settings)
        stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        for parameter in stack.parameters():
            nn.init.normal_(parameter, 0.0, 0.4)
    return stack


def our_names(model: GargModel) -> dict[str, Tensor]:
    """The weights as the reader hands them on."""
    state = {
        name.removeprefix("_backbone.").removeprefix("_"): tensor
        for name, tensor in model.state_dict().items()
    }
    return {name: tensor for name, tensor in state.items() if name != "wte.weight"}


@pytest.fixture
def some_prompts() -> Prompts:
    return sample_prompts(TASK, 32, generator=generator_for(0, "eval", 0))


@pytest.fixture
def published() -> GargModel:
    return garg()


@pytest.fixture
def gpt2(published: GargModel) -> LayeredModel:
    return gpt2_model(our_names(published), LayerLaw(n_heads=4, activation="gelu_new"))


def test_a_gpt2_predicts_what_the_published_code_does(
    published: GargModel, gpt2: LayeredModel, some_prompts: Prompts
):
    expected = published.at_query(some_prompts)
    assert expected.std() > 0.1
    torch.testing.assert_close(gpt2.predict(some_prompts), expected, atol=1e-5, rtol=1e-5)
    assert (gpt2.n_layers, gpt2.n_heads, gpt2.d_x, gpt2.d_y) == (3, 4, 3, 1)


@pytest.mark.parametrize("masked", [[(1, 2)], [(0, 0), (0, 3), (2, 1)]])
def test_masking_a_gpt2_head_zeroes_its_output(
    published: GargModel, gpt2: LayeredModel, some_prompts: Prompts, masked: list
):
    before = gpt2.predict(some_prompts)
    for layer in range(3):
        heads = [head for at, head in masked if at == layer]

        def zero(module: nn.Module, inputs: tuple[Tensor], heads=heads) -> tuple[Tensor]:
            z = inputs[0].clone().unflatten(-1, (4, 4))
            z[..., heads, :] = 0
            return (z.flatten(-2),)

        published._backbone.h[layer].attn.c_proj.register_forward_pre_hook(zero)
    expected = published.at_query(some_prompts)
    found = gpt2.predict(some_prompts, masked_heads=masked)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - before).abs().max() > 0.01
    assert torch.equal(gpt2.predict(some_prompts), before)


def test_each_masked_is_predict_with_that_head_masked(gpt2: LayeredModel, some_prompts: Prompts):
    full, each = gpt2.predict_each_masked(some_prompts)
    assert each.shape == (32, 3, 4, 1)
    torch.testing.assert_close(full, gpt2.predict(some_prompts))
    for layer in range(3):
        for head in range(4):
            alone = gpt2.predict(some_prompts, masked_heads=[(layer, head)])
            torch.testing.assert_close(each[:, layer, head], alone)


def test_the_activation_and_the_norms_eps_are_the_laws(some_prompts: Prompts):
    model = garg()
    law = LayerLaw(n_heads=4, activation="relu", layer_norm_eps=0.5)
    for block in model._backbone.h:
        block.mlp.act = nn.ReLU()
        block.ln_1.eps = block.ln_2.eps = 0.5
    model._backbone.ln_f.eps = 0.5
    found = gpt2_model(our_names(model), law).predict(some_prompts)
    torch.testing.assert_close(found, model.at_query(some_prompts), atol=1e-5, rtol=1e-5)


def test_several_responses_enter_side_by_side():
    task = TaskConfig(d_x=3, d_y=2, context_length=4)
    prompts = sample_prompts(task, 5, generator=generator_for(0, "eval", 0))
    model = garg()
    read_out = nn.Linear(16, 2)
    tensors = our_names(model) | {f"read_out.{k}": v for k, v in read_out.state_dict().items()}
    tokens = torch.zeros(5, 9, 3)
    tokens[:, :8:2], tokens[:, 1::2, :2], tokens[:, 8] = prompts.x, prompts.y, prompts.x_query
    stream = model._backbone(inputs_embeds=model._read_in(tokens)).last_hidden_state
    found = gpt2_model(tensors, LayerLaw(4, "gelu_new")).predict(prompts)
    torch.testing.assert_close(found, read_out(stream[:, -1]).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"norm_first": True}, {"activation": "gelu"}, {"bias": False}, {"layer_norm_eps": 0.5}],
)
def test_an_encoder_predicts_what_torchs_does(settings: dict, some_prompts: Prompts):
    stack = encoder(4, **settings)
    law = LayerLaw(
        2,
        settings.get("activation", "relu"),
        settings.get("layer_norm_eps", 1e-5),
        norm_first=settings.get("norm_first", False),
    )
    model = encoder_model(stack.state_dict(), law, d_x=3, d_y=1)
    with torch.no_grad():
        expected = stack(some_prompts.tokens)[:, -1, 3:]
    torch.testing.assert_close(model.predict(some_prompts), expected, atol=1e-5, rtol=1e-5)
    assert (model.n_layers, model.max_context) == (2, None)


def test_an_encoder_with_read_in_last_norm_and_read_out(some_prompts: Prompts):
    stack, read_in, read_out = encoder(8), nn.Linear(4, 8, bias=False), nn.Linear(8, 1)
    norm = nn.LayerNorm(8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    stack.norm = norm
    tensors = stack.state_dict()
    for name, module in (("read_in", read_in), ("read_out", read_out)):
        tensors |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
    model = encoder_model(tensors, LayerLaw(2, "relu", norm_first=False), d_x=3, d_y=1)
    with torch.no_grad():
        expected = read_out(stack(read_in(some_prompts.tokens))[:, -1])
    torch.testing.assert_close(model.predict(some_prompts), expected, atol=1e-5, rtol=1e-5)


def test_masking_an_encoder_head_zeroes_its_columns(some_prompts: Prompts):
    stack = encoder(4)
    model = encoder_model(stack.state_dict(), LayerLaw(2, "relu", norm_first=False), d_x=3, d_y=1)
    found = model.predict(some_prompts, masked_heads=[(1, 0)])
    with torch.no_grad():
        stack.layers[1].self_attn.out_proj.weight[:, :2] = 0
        expected = stack(some_prompts.tokens)[:, -1, 3:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_query_that_is_no_key_is_seen_by_no_token(some_prompts: Prompts):
    stack = encoder(4)
    law = LayerLaw(2, "relu", norm_first=False, attend_to_self=False)
    model = encoder_model(stack.state_dict(), law, d_x=3, d_y=1)
    barred = torch.zeros(7, 7).masked_fill(torch.arange(7) == 6, -torch.inf)
    with torch.no_grad():
        expected = stack(some_prompts.tokens, mask=barred)[:, -1, 3:]
    torch.testing.assert_close(model.predict(some_prompts), expected, atol=1e-5, rtol=1e-5)


def test_half_precision_is_run_in_single_and_double_in_double(some_prompts: Prompts):
    stack, law = encoder(4), LayerLaw(2, "relu", norm_first=False)
    half = {name: tensor.half() for name, tensor in stack.state_dict().items()}
    assert encoder_model(half, law, d_x=3, d_y=1).predict(some_prompts).dtype == torch.float32
    mixed = half | {"layers.0.norm1.weight": half["layers.0.norm1.weight"].double()}
    assert encoder_model(mixed, law, d_x=3, d_y=1).predict(some_prompts).dtype == torch.float64


def test_building_a_model_draws_no_random_numbers(published: GargModel):
    state = torch.random.get_rng_state()
    gpt2_model(our_names(published), LayerLaw(n_heads=4, activation="gelu_new"))
    encoder_model(encoder(4).state_dict(), LayerLaw(2, "relu", norm_first=False), d_x=3, d_y=1)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("head", [(3, 0), (0, 4), (-1, 0)])
def test_heads_that_do_not_exist_are_refused(
    gpt2: LayeredModel, some_prompts: Prompts, head: tuple
):
    with pytest.raises(ValueError, match=r"masked_heads must lie in 3 layers of 4 heads, got \("):
        gpt2.predict(some_prompts, masked_heads=[head])


def test_prompts_that_do_not_fit_are_refused(gpt2: LayeredModel):
    def draw(**changes: int) -> Prompts:
        task = TaskConfig(**{"d_x": 3, "context_length": 9} | changes)
        return sample_prompts(task, 2, generator=generator_for(0, "eval", 0))

    assert gpt2.predict(draw()).shape == (2, 1)
    words = r"context_length must be <= 9, as 2 \* 9 \+ 1 positions are all that n_positions has room for, got 10"
    with pytest.raises(ValueError, match=words):
        gpt2.predict(draw(context_length=10))
    with pytest.raises(ValueError, match=r"must be the model's, \(3, 1\), got \(4, 1\)"):
        gpt2.predict_each_masked(draw(d_x=4))


@pytest.mark.parametrize("module", ["models", "checkpoints", "analysis"])
def test_hooks_and_transformers_are_not_imported_to_run_a_model(module: str):
    code = f"""
import sys, torch, mechinterp.{module}.layered
from mechinterp.models.layered import LayerLaw, encoder_model
state = torch.nn.TransformerEncoderLayer(6, 2, 8).state_dict()
state = {{f"layers.0.{{name}}": tensor for name, tensor in state.items()}}
encoder_model(state, LayerLaw(2, "relu"), d_x=5, d_y=1)
print([n for n in ("transformers", "transformer_lens") if n in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
