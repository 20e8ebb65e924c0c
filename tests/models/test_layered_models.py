"""Models with norms, MLPs and positions predict what torch's and Hugging Face's modules do, masked heads too."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import read_foreign
from mechinterp.checkpoints.foreign.settings import Stored, settled
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.layers import turned_by_position
from mechinterp.models.run import hooks
from mechinterp.models.run.general import masked_predictions, predict_deep, query_patterns
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import assert_close_to_rounding, refused, sampled
from tests.deep_models import GPT2, WIDE, random_model

TASK = TaskConfig(d_x=3, context_length=6, beta_var=1.0, noise_var=0.0)


class GargModel(nn.Module):
    """Garg et al.'s TransformerModel, as published."""

    def __init__(self, n_dims: int, n_positions: int, *, n_embd=16, n_layer=3, n_head=4):
        super().__init__()
        sizes = {"n_embd": n_embd, "n_layer": n_layer, "n_head": n_head}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        start = {"n_positions": 2 * n_positions, "initializer_range": 0.3, "use_cache": False}
        configuration = GPT2Config(**sizes, **rates, **start)
        self._read_in = nn.Linear(n_dims, n_embd)
        self._backbone = GPT2Model(configuration)
        self._read_out = nn.Linear(n_embd, 1)

    @staticmethod
    def _combine(xs_b: Tensor, ys_b: Tensor) -> Tensor:
        bsize, points, dim = xs_b.shape
        zeros = torch.zeros(bsize, points, dim - 1, dtype=ys_b.dtype)
        ys_b_wide = torch.cat((ys_b.view(bsize, points, 1), zeros), 2)
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


def read_gpt2(state: dict[str, Tensor], **settings: object) -> Checkpoint:
    """The state dict of a Garg model of 4 heads, through the reader of such files."""
    hints = Hints(n_heads=4)
    return read_foreign([Stored(Path("x.pt"), state, settled(settings))], hints)


def read_encoder(
    state: dict[str, Tensor], *, attend_to_self: bool | None = None, **settings: object
) -> Checkpoint:
    """The state dict of encoder layers of 2 heads for d_x = 3, through the reader of such files."""
    stated = {"columns": "x,y", "sign": "plus", "model": {"positions": "none"}}
    hints = Hints(n_heads=2, attend_to_self=attend_to_self, **stated)
    return read_foreign([Stored(Path("x.pt"), state, settled(settings))], hints)


def predicted(checkpoint: Checkpoint, prompts: Prompts) -> Tensor:
    """The prediction of the hooked model."""
    with torch.no_grad():
        return checkpoint.model.predict(prompts)


def without(checkpoint: Checkpoint, prompts: Prompts, heads: list[Head]) -> Tensor:
    """The prediction with heads masked."""
    return checkpoint.predictor.run(prompts, [heads])[0]


@pytest.fixture
def some_prompts() -> Prompts:
    return draw_prompts(TASK, 32, dtype=torch.float64)


@pytest.fixture
def published() -> GargModel:
    return garg().double()


@pytest.fixture(scope="module")
def gpt2() -> Checkpoint:
    return read_gpt2(garg().double().state_dict())


def test_a_gpt2_predicts_what_the_published_code_does(
    published: GargModel, gpt2: Checkpoint, some_prompts: Prompts
):
    expected = published.at_query(some_prompts)
    assert expected.std() > 0.01  # not a constant
    assert_close_to_rounding(predicted(gpt2, some_prompts), expected)
    assert_close_to_rounding(gpt2.predictor.predict(some_prompts).detach(), expected)
    cfg = gpt2.model.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_x, cfg.d_y) == (3, 4, 3, 1)


@pytest.mark.parametrize("masked", [[(1, 2)], [(0, 0), (0, 3), (2, 1)]])
def test_masking_a_gpt2_head_zeroes_its_output(
    published: GargModel, gpt2: Checkpoint, some_prompts: Prompts, masked: list
):
    before = predicted(gpt2, some_prompts)
    for layer in range(3):
        heads = [head for at, head in masked if at == layer]

        def zero(module: nn.Module, inputs: tuple[Tensor], heads=heads) -> tuple[Tensor]:
            z = inputs[0].clone().unflatten(-1, (4, 4))
            z[..., heads, :] = 0
            return (z.flatten(-2),)

        published._backbone.h[layer].attn.c_proj.register_forward_pre_hook(zero)
    expected = published.at_query(some_prompts)
    prediction = without(gpt2, some_prompts, masked)
    assert_close_to_rounding(prediction, expected)
    assert (prediction - before).abs().max() > 0.01
    assert torch.equal(predicted(gpt2, some_prompts), before)


@pytest.mark.parametrize(
    "activation",
    sampled(["gelu_new", "gelu", "relu", "silu", "tanh"], keep="relu".__eq__),
)
def test_activation_and_eps_of_the_norms_are_the_stated_ones(
    activation: str, some_prompts: Prompts
):
    from transformers.activations import ACT2FN

    model = garg().double()
    model._backbone.ln_f.eps = 0.5
    for block in model._backbone.h:
        block.mlp.act, block.ln_1.eps, block.ln_2.eps = ACT2FN[activation], 0.5, 0.5
    stated = {"activation_function": activation, "layer_norm_epsilon": 0.5}
    prediction = predicted(read_gpt2(model.state_dict(), **stated), some_prompts)
    assert_close_to_rounding(prediction, model.at_query(some_prompts))


@pytest.mark.parametrize("biased", [True, False])
def test_several_responses_enter_side_by_side(biased: bool):
    task = TaskConfig(d_x=3, d_y=2, context_length=4)
    prompts = draw_prompts(task, 5, dtype=torch.float64)
    model = garg().double()
    model._read_in = nn.Linear(3, 16, bias=biased).double()
    model._read_out = read_out = nn.Linear(16, 2, bias=biased).double()
    tokens = torch.zeros(5, 9, 3, dtype=torch.float64)
    tokens[:, :8:2], tokens[:, 1::2, :2], tokens[:, 8] = prompts.x, prompts.y, prompts.x_query
    stream = model._backbone(inputs_embeds=model._read_in(tokens)).last_hidden_state
    prediction = predicted(read_gpt2(model.state_dict()), prompts)
    assert_close_to_rounding(prediction, read_out(stream[:, -1]).detach())


@pytest.mark.parametrize(
    ("settings", "attend_to_self"),
    [
        ({}, True),
        ({"norm_first": True, "bias": False}, False),
        ({"activation": "gelu", "layer_norm_eps": 0.5}, True),
    ],
    ids=str,
)
def test_an_encoder_predicts_what_torchs_does(
    settings: dict, attend_to_self: bool, some_prompts: Prompts
):
    stack = encoder(4, **settings).double()
    stack.norm = norm(4, eps=settings.get("layer_norm_eps", 1e-5))
    stated = {"norm_first": False, "activation": "relu"} | settings
    stated.pop("bias", None)
    checkpoint = read_encoder(stack.state_dict(), attend_to_self=attend_to_self, **stated)
    model = checkpoint.weights.model
    assert (model.biases, model.final_norm) == (settings.get("bias", True), True)
    assert (model.norm == "before") == settings.get("norm_first", False)
    expected = of_torch(stack, some_prompts.tokens, attend_to_self)[:, -1, 3:]
    assert expected.std() > 1e-3  # a prediction that varies, far above rounding
    assert_close_to_rounding(predicted(checkpoint, some_prompts), expected)
    assert (checkpoint.model.cfg.n_layers, model.n_positions) == (2, None)


def norm(width: int, **settings) -> nn.LayerNorm:
    """A last norm of which no entry is at 0 or 1."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layer = nn.LayerNorm(width, dtype=torch.float64, **settings)
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def of_torch(stack: nn.Module, tokens: Tensor, attend_to_self: bool) -> Tensor:
    """The stream behind torch's layers, no token reading the query unless told so."""
    n_pos = tokens.shape[1]
    barred = torch.zeros(n_pos, n_pos, dtype=tokens.dtype)
    barred[:, -1] = 0 if attend_to_self else -torch.inf
    with torch.no_grad():
        return stack(tokens, mask=barred)


def test_an_encoder_with_read_in_last_norm_and_read_out(some_prompts: Prompts):
    stack = encoder(8, bias=False).double()
    read_in, read_out = (nn.Linear(*shape, bias=False).double() for shape in ((4, 8), (8, 1)))
    stack.norm = norm(8)
    tensors = stack.state_dict()
    for name, module in (("read_in", read_in), ("read_out", read_out)):
        tensors |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
    stated = {"norm_first": False, "activation": "relu"}
    checkpoint = read_encoder(tensors, attend_to_self=True, **stated)
    with torch.no_grad():
        expected = read_out(of_torch(stack, read_in(some_prompts.tokens), True)[:, -1])
    assert_close_to_rounding(predicted(checkpoint, some_prompts), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_length": 10}, ("context_length", 9, "n_positions = 20", 10)),
        ({"d_x": 4}, ("(d_x, d_y)", "(3, 1)", "(4, 1)")),
    ],
)
def test_prompts_that_do_not_fit_are_refused(gpt2: Checkpoint, changes: dict, words: tuple):
    given = draw_prompts(TaskConfig(**{"d_x": 3, "context_length": 9} | changes), 2)
    ways = (gpt2.model.predict, gpt2.predictor.predict, gpt2.predictor.run, gpt2.predictor.streams)
    for use in (*ways, lambda prompts: gpt2.predictor.query_streams(prompts, 1)):
        with refused(*words):
            use(given.to(torch.float64))


# Rotary positions

HALVES = ModelConfig(rotary_dim=4, rotary_base=100.0)
PAIRS = ModelConfig(rotary_dim=4, rotary_base=100.0, rotary_adjacent_pairs=True)


def test_two_entries_turn_by_their_position():
    """With two entries both pairings are one rotation by the position itself, in radians."""
    heads = torch.tensor([1.0, 0.0]).expand(3, 1, 2)
    for adjacent in (False, True):
        turned = turned_by_position(
            heads, ModelConfig(rotary_dim=2, rotary_adjacent_pairs=adjacent)
        )
        expected = torch.tensor([[math.cos(t), math.sin(t)] for t in range(3)])
        torch.testing.assert_close(turned[:, 0], expected)


def test_halves_are_those_of_llama_and_pairs_those_of_gptj():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, 3, 4, generator=generator) for _ in "qk")
    angle = torch.arange(5)[:, None] * 100.0 ** -(torch.arange(0, 4, 2) / 4)
    both = torch.cat([angle, angle], -1)[None]
    theirs = llama.apply_rotary_pos_emb(q, k, both.cos(), both.sin(), unsqueeze_dim=2)
    for one, other in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(turned_by_position(one, HALVES), other)
    sin, cos = angle.sin()[None], angle.cos()[None]
    torch.testing.assert_close(turned_by_position(q, PAIRS), gptj.apply_rotary_pos_emb(q, sin, cos))


def test_entries_behind_the_turned_ones_stay_and_later_rows_turn_further():
    heads = torch.randn(6, 1, 5)
    turned = turned_by_position(heads, HALVES)
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    torch.testing.assert_close(turned_by_position(heads[4:], HALVES, first=4), turned[4:])
    assert turned_by_position(heads, ModelConfig()) is heads


@pytest.mark.parametrize("adjacent", [False, True])
def test_rotary_weights_alone_run_as_the_hooked_model_does(adjacent: bool):
    settings = {"rotary_dim": 2, "rotary_base": 50.0, "rotary_adjacent_pairs": adjacent}
    model = random_model(2, 2, d_head=3, attend_to_self=True, **settings)
    plain = random_model(2, 2, d_head=3, attend_to_self=True)
    prompts = draw_prompts(TaskConfig(d_x=4, context_length=6), 8, seed=0, dtype=torch.float64)
    predicted = model.predict(prompts)
    torch.testing.assert_close(predict_deep(model.weights, prompts), predicted)
    assert (plain.predict(prompts) - predicted).abs().max() > 1e-3
    masked = masked_predictions(model.weights, prompts, [[], [(0, 1)]])
    torch.testing.assert_close(masked[0], predicted)
    _, cache = model.run_with_cache(model.tokens(prompts))
    patterns = torch.stack([cache["pattern", layer][:, :, -1] for layer in range(2)])
    torch.testing.assert_close(query_patterns(model.weights, prompts), patterns)
    q, turned = cache["blocks.0.attn.hook_q"], cache["blocks.0.attn.hook_rot_q"]
    torch.testing.assert_close(turned_by_position(q, model.cfg.model), turned)


@pytest.mark.parametrize(
    "architecture",
    [
        {**WIDE, "score": "linear/L"},
        {**WIDE, "biases": True},
        {"norm": "before", "final_norm": True, "d_mlp": 7, "d_model": 8, "d_head": 4},
        GPT2,
    ],
)
def test_heads_write_at_the_query_what_hooks_read_there(architecture: dict):
    model = random_model(3, 2, **architecture)
    prompts = draw_prompts(TaskConfig(d_x=4, context_length=6), 8, seed=0, dtype=torch.float64)
    predictor = predictor_of(model)
    expected = hooks.query_writes(predictor.hooked, prompts)
    torch.testing.assert_close(predictor.query_writes(prompts), expected)


def test_sizes_of_rotary_positions_are_checked():
    for wrong in ({"rotary_dim": 3}, {"rotary_base": 0.0}, {"rotary_dim": 2, "merged_qk": True}):
        with refused(next(iter(wrong))):
            ModelConfig(**wrong)


OTHERS_CODE = {
    "norm of the MLP alone": {"norm": "before_mlp", "d_mlp": 5, "d_model": 6, "biases": True},
    "pairs, all keys": {"score": "linear/pairs", "context_only": True, "attend_to_self": True},
    "pairs, causal": {"score": "linear/pairs", "n_layers": 2},
    "pairs, one layer": {"score": "linear/pairs", "attend_to_self": True, "n_layers": 1},
}


@pytest.mark.parametrize("kind", OTHERS_CODE)
def test_settings_of_others_code_are_those_by_hand(kind: str, some_prompts: Prompts):
    """A norm that the MLP alone reads through, and linear scores over the number of pairs, whatever the number of keys."""
    settings = {"n_layers": 2, "n_heads": 2, "d_head": 3} | OTHERS_CODE[kind]
    hooked = random_model(**settings, sizes={"d_x": 3, "d_y": 1})
    model, weights = hooked.cfg.model, hooked.weights
    stream = some_prompts.tokens
    tensors, n = weights.tensors, stream.shape[1]
    stream = stream @ tensors["W_in"] + tensors["b_in"] if "W_in" in tensors else stream
    reads = torch.ones(n, n, dtype=stream.dtype)
    reads = reads if model.context_only else reads.tril(0 if model.attend_to_self else -1)
    for layer in range(model.n_layers):
        part = {name: tensor[layer] for name, tensor in tensors.items() if tensor.ndim > 1}
        q, k, v = (torch.einsum("btm,hmd->bhtd", stream, part[f"attn.W_{x}"]) for x in "QKV")
        if model.biases:
            q, k, v = (
                z + part[f"attn.b_{x}"][:, None] for z, x in zip((q, k, v), "QKV", strict=True)
            )
        scores = weights.scale * q @ k.mT
        if model.score == "softmax":
            masked = scores.masked_fill(reads == 0, -torch.inf).softmax(-1).nan_to_num(0.0)
        else:
            masked = scores * reads / (n - 1)
        stream = stream + torch.einsum("bhtd,hdm->btm", masked @ v, part["attn.W_O"])
        if model.d_mlp is None:
            continue
        stream = stream + part["attn.b_O"]
        read = nn.functional.layer_norm(stream, (6,), part["ln2.w"], part["ln2.b"])
        hidden = (read @ part["mlp.W_in"] + part["mlp.b_in"]).relu()
        stream = stream + hidden @ part["mlp.W_out"] + part["mlp.b_out"]
    expected = stream[:, -1, -1:]
    if "unembed.W_U" in tensors:
        expected = stream[:, -1] @ tensors["unembed.W_U"] + tensors["unembed.b_U"]
    assert_close_to_rounding(predictor_of(weights).predict(some_prompts), expected)
    assert_close_to_rounding(hooked.predict(some_prompts), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"score": "linear/pairs", "n_layers": 1},
        {"score": "linear/pairs", "context_only": True},
        {"norm": "before_mlp"},
    ],
)
def test_settings_that_are_another_one_are_refused(settings: dict):
    """A query that reads the pairs alone has linear/L; a norm of the MLP needs an MLP."""
    with refused("norm" if "norm" in settings else "score"):
        ModelConfig(**{"n_layers": 2, **settings})
