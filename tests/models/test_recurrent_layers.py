"""Recurrent layers: their states and outputs are the published recurrences, by weights and through hooks.

The oracles are recurrences written token by token here, transformers' gated delta rule, and, where
flash-linear-attention is installed (`pip install --no-deps fla-core`), its naive forms.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.config.model import FORGETTING, RECURRENT
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.recurrence import Memory
from mechinterp.models.run.general import predictions, predictions_at_every
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights
from mechinterp.training.general.step import loss_and_gradients
from mechinterp.training.general.trainer import initial_deep_weights
from tests.conftest import assert_close_to_rounding, refused
from tests.deep_models import random_model

BATCH, LENGTH, HEADS, WIDTH = 3, 12, 2, 4
STACK = {"norm": "before", "final_norm": True, "biases": True, "d_mlp": 7, "d_model": 8}
KINDS = {
    "alone": {"n_layers": 1},
    "own gates, self": {"n_layers": 1, "gates": "token", "attend_to_self": True},
    "stack": {"n_layers": 2, "gates": "token", "d_head": 4, **STACK},
    "in turn": {"n_layers": 2, "d_model": 8, "layout": "in_turn", "rotary_dim": 4},
}


def draws() -> dict[str, Tensor]:
    """Random queries, keys, values, gates, strengths and penalties, in float64."""
    names, shape = ("q", "k", "v"), (BATCH, LENGTH, HEADS, WIDTH)
    drawn = {name: torch.randn(shape, dtype=torch.float64) for name in names}
    drawn["k"] /= 2
    drawn |= {n: torch.rand(shape[:3], dtype=torch.float64) for n in ("gate", "beta")}
    return drawn | {"ridge": 0.1 + torch.rand(HEADS, WIDTH, dtype=torch.float64)}


def memory(rule: str, drawn: dict[str, Tensor]) -> Memory:
    """Memory of a rule, with the parts that it has."""
    gate = drawn["gate"] if rule in FORGETTING else None
    beta = None if rule == "gated" else drawn["beta"]
    return Memory(
        rule, drawn["k"], drawn["v"], gate, beta, drawn["ridge"] if rule == "mesa" else None
    )


def states_one_by_one(rule: str, drawn: dict[str, Tensor]) -> list[Tensor]:
    """States [batch, head, d, d] after 0, 1, ... tokens by the published recurrence."""
    S = H = torch.zeros(BATCH, HEADS, WIDTH, WIDTH, dtype=torch.float64)
    G, states = S, [S]
    for t in range(LENGTH):
        k, v = drawn["k"][:, t, :, :, None], drawn["v"][:, t, :, None, :]
        gate, beta = drawn["gate"][:, t, :, None, None], drawn["beta"][:, t, :, None, None]
        if rule == "gated":
            S = gate * S + k * v
        elif rule == "mesa":
            H, G = gate * H + beta * k * k.mT, gate * G + beta * k * v
            S = torch.linalg.inv(H + torch.diag_embed(drawn["ridge"])) @ G
        else:
            S = S if rule == "delta" else gate * S
            S = S + beta * k * (v - k.mT @ S)
        states.append(S)
    return states


@pytest.mark.parametrize("rule", RECURRENT)
def test_states_and_outputs_are_those_of_the_recurrence(rule: str):
    drawn = draws()
    own, expected = memory(rule, drawn), torch.stack(states_one_by_one(rule, drawn), 1)
    every = range(LENGTH + 1)
    torch.testing.assert_close(own.states(every), expected, rtol=1e-10, atol=1e-10)
    before = range(LENGTH)
    z = torch.einsum("brhd,brhdv->brhv", drawn["q"], expected[:, :-1])
    torch.testing.assert_close(own.read(drawn["q"], before), z, rtol=1e-10, atol=1e-10)
    averaged = torch.einsum("bhrk,bkhv->brhv", own.pattern(drawn["q"], before), drawn["v"])
    torch.testing.assert_close(averaged, z, rtol=1e-10, atol=1e-10)
    assert not own.pattern(drawn["q"], before).triu().any()


@pytest.mark.parametrize("rule", RECURRENT)
def test_a_change_of_a_state_passes_on_by_the_steps(rule: str):
    """S_t is linear in S_{t-1}: steps and writes give it back."""
    drawn = draws()
    own, states = memory(rule, drawn), states_one_by_one(rule, drawn)
    zero = memory(rule, drawn | {"v": torch.zeros_like(drawn["v"])})
    assert not zero.states(range(LENGTH + 1)).any()
    steps = own.steps()
    for t in range(LENGTH):
        alone = drawn | {"v": drawn["v"].clone()}
        alone["v"][:, t] = 0
        unwritten = states_one_by_one(rule, alone)[t + 1]
        torch.testing.assert_close(steps[:, t] @ states[t], unwritten, rtol=1e-9, atol=1e-10)


def test_gates_of_each_coordinate_are_those_of_the_recurrence():
    """Gated linear attention with one gate for each coordinate of the keys; equal gates are one gate."""
    drawn, every = draws(), range(LENGTH + 1)
    gate = torch.rand(drawn["k"].shape, dtype=torch.float64)
    own = Memory("gated", drawn["k"], drawn["v"], gate, None, None)
    states = [torch.zeros(BATCH, HEADS, WIDTH, WIDTH, dtype=torch.float64)]
    for t in range(LENGTH):
        written = drawn["k"][:, t, :, :, None] * drawn["v"][:, t, :, None]
        states.append(gate[:, t, ..., None] * states[-1] + written)
    expected = torch.stack(states, 1)
    torch.testing.assert_close(own.states(every), expected, rtol=1e-10, atol=1e-10)
    z = torch.einsum("brhd,brhdv->brhv", drawn["q"], expected[:, :-1])
    torch.testing.assert_close(own.read(drawn["q"], range(LENGTH)), z, rtol=1e-10, atol=1e-10)
    averaged = torch.einsum("bhrk,bkhv->brhv", own.pattern(drawn["q"], range(LENGTH)), drawn["v"])
    torch.testing.assert_close(averaged, z, rtol=1e-10, atol=1e-10)
    after = own.steps()[:, 3] @ states[3] + drawn["k"][:, 3, :, :, None] * drawn["v"][:, 3, :, None]
    torch.testing.assert_close(after, states[4], rtol=1e-10, atol=1e-10)
    equal = drawn["gate"][..., None].expand(gate.shape)
    same = Memory("gated", drawn["k"], drawn["v"], equal, None, None)
    torch.testing.assert_close(same.states(every), memory("gated", drawn).states(every))


def test_the_gated_delta_rule_is_that_of_transformers():
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    drawn = draws()
    given = (*(drawn[n] for n in "qkv"), drawn["gate"].log(), drawn["beta"])
    own = memory("gated_delta", drawn)
    z = own.read(drawn["q"] / WIDTH**0.5, range(1, LENGTH + 1))
    for theirs in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        # They compute in float32.
        found, _ = theirs(*given, initial_state=None, output_final_state=False)
        torch.testing.assert_close(z, found.double(), rtol=1e-6, atol=1e-6)


def naive(op: str) -> ModuleType:
    """Naive forms of flash-linear-attention, one file of plain torch; its package needs triton."""
    found = importlib.util.find_spec("fla")
    if found is None:
        pytest.skip("flash-linear-attention is not installed")
    (folder,) = found.submodule_search_locations
    file = Path(folder) / "ops" / op / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{op}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rule", RECURRENT)
def test_outputs_are_those_of_flash_linear_attention(rule: str):
    drawn = draws()
    q, k, v, gate, beta = (drawn[name] for name in ("q", "k", "v", "gate", "beta"))
    if rule == "gated":
        theirs = naive("simple_gla").naive_recurrent_simple_gla(q, k, v, gate.log(), scale=1.0)[0]
    elif rule == "delta":
        turned = (q * WIDTH**0.5).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        form = naive("delta_rule").delta_rule_recurrence
        theirs = form(*turned, beta.transpose(1, 2))[0].transpose(1, 2)
    elif rule == "gated_delta":
        form = naive("gated_delta_rule").naive_recurrent_gated_delta_rule
        theirs = form(q, k, v, beta, gate.log(), scale=1.0)[0]
    else:
        form = naive("mesa_net").naive_mesa_net_exact
        theirs = form(q, k, v, gate.log(), drawn["ridge"], beta)[0]
    z = memory(rule, drawn).read(q, range(1, LENGTH + 1))
    # They compute in float32.
    torch.testing.assert_close(z, theirs.double(), rtol=1e-6, atol=2e-6)


def test_a_gate_of_zero_forgets_everything():
    drawn = draws()
    drawn["gate"][:, 5] = 0
    states = memory("gated", drawn).states(range(LENGTH + 1))
    written = drawn["k"][:, 5, :, :, None] * drawn["v"][:, 5, :, None, :]
    torch.testing.assert_close(states[:, 6], written)


def prompts_of(model: ICLTransformer) -> Prompts:
    return draw_prompts(TaskConfig(d_x=4, context_length=9), 6, dtype=torch.float64)


def model_of(rule: str, kind: str) -> ICLTransformer:
    return random_model(n_heads=2, score=rule, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RECURRENT)
def test_weights_and_hooks_predict_the_same_and_z_is_a_times_v(rule: str, kind: str):
    model = model_of(rule, kind)
    prompts = prompts_of(model)
    output, cache = model.run_with_cache(prompts)
    assert_close_to_rounding(predictions(model.weights, prompts), output[:, -1].detach())
    for layer in range(model.cfg.n_layers):
        z = torch.einsum("bhqk,bkhv->bqhv", cache["pattern", layer], cache["v", layer])
        assert_close_to_rounding(z, cache["z", layer])
        state = cache[f"blocks.{layer}.attn.hook_state"]
        q = cache["rot_q" if model.cfg.rotary_dim else "q", layer]
        own = model.cfg.model.attend_to_self
        read = state if own else torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], 1)
        by_state = model.cfg.scale * torch.einsum("bqhd,bqhdv->bqhv", q, read)
        torch.testing.assert_close(by_state, cache["z", layer], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["alone", "in turn"])
@pytest.mark.parametrize("rule", RECURRENT)
def test_one_pass_predicts_at_every_x(rule: str, kind: str):
    model = model_of(rule, kind)
    prompts = prompts_of(model)
    every = predictor_of(model).predict_at_every(prompts)
    for length in range(10):
        alone = predictions(model.weights, prompts.prefix(length))
        torch.testing.assert_close(every[:, length], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RECURRENT)
def test_a_patched_state_carries_the_past_of_another_prompt(rule: str):
    """The state after token 4 of another prompt, with the same later tokens, gives its prediction."""
    model = model_of(rule, "alone")
    prompts = prompts_of(model)
    other = draw_prompts(TaskConfig(d_x=4, context_length=9), 6, seed=1, dtype=torch.float64)
    mixed_tokens = model.tokens(prompts).clone()
    mixed_tokens[:, :5] = model.tokens(other)[:, :5]
    name = "blocks.0.attn.hook_state"
    _, cache = model.run_with_cache(mixed_tokens, names_filter=name)

    def put(state: Tensor, hook: object) -> Tensor:
        state[:, 4] = cache[name][:, 4]
        return state

    patched = model.run_with_hooks(model.tokens(prompts), fwd_hooks=[(name, put)])
    if rule == "mesa":
        # H, the second moment of the keys, is not part of the state.
        expected = by_loop(model, prompts, cache[name][:, 4], at=4)
        torch.testing.assert_close(patched[:, -1], expected, rtol=1e-9, atol=1e-12)
        return
    torch.testing.assert_close(patched[:, 5:], model(mixed_tokens)[:, 5:], rtol=1e-9, atol=1e-12)


def by_loop(model: ICLTransformer, prompts: Prompts, state: Tensor, *, at: int) -> Tensor:
    """Prediction of a mesa layer whose state after token `at` is set, and updated from there by least squares."""
    _, cache = model.run_with_cache(prompts)
    attn, k, v = model.blocks[0].attn, cache["k", 0], cache["v", 0]
    gate, beta = torch.sigmoid(attn.b_gate), torch.sigmoid(attn.b_beta)
    ridge = torch.diag_embed(torch.nn.functional.softplus(attn.b_ridge))
    H, S = torch.zeros(6, 2, 5, 5, dtype=torch.float64), state
    for t in range(9):
        before = H + ridge
        H = gate[:, None, None] * H + beta[:, None, None] * k[:, t, :, :, None] * k[:, t, :, None]
        if t > at:
            G = gate[:, None, None] * before @ S
            G = G + beta[:, None, None] * k[:, t, :, :, None] * v[:, t, :, None]
            S = torch.linalg.solve(H + ridge, G)
    z = model.cfg.scale * torch.einsum("bhd,bhdv->bhv", cache["q", 0][:, -1], S)
    return torch.einsum("bhv,hvm->bm", z, attn.W_O)[:, 4:]


def test_a_gradient_at_the_state_is_that_of_the_whole_later_computation():
    model = model_of("gated_delta", "alone")
    prompts, name = prompts_of(model), "blocks.0.attn.hook_state"
    _, cache = model.run_with_cache(prompts, names_filter=name, return_type="loss", incl_bwd=True)
    step = 1e-6
    change = torch.zeros_like(cache[name][0, 3])
    change[0, 1, 2] = step

    def shift(state: Tensor, hook: object) -> Tensor:
        state[0, 3] += change
        return state

    up = model.run_with_hooks(prompts, return_type="loss", fwd_hooks=[(name, shift)])
    change[0, 1, 2] = -step
    down = model.run_with_hooks(prompts, return_type="loss", fwd_hooks=[(name, shift)])
    slope = (up - down).item() / (2 * step)
    assert cache[f"{name}_grad"][0, 3, 0, 1, 2].item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("name", ["gate", "beta", "pattern"])
def test_hooks_on_gates_and_patterns_change_the_prediction(name: str):
    model = model_of("gated_delta", "alone")
    prompts = prompts_of(model)
    point = f"blocks.0.attn.hook_{name}"
    zeroed = model.run_with_hooks(prompts, fwd_hooks=[(point, lambda values, hook: 0 * values)])
    if name == "gate":
        _, cache = model.run_with_cache(prompts)
        # All but the last pair is forgotten.
        last = cache["k", 0][:, -2, :, :, None] * cache["v", 0][:, -2, :, None]
        state = torch.sigmoid(model.blocks[0].attn.b_beta)[:, None, None] * last
        z = model.cfg.scale * torch.einsum("bhd,bhdv->bhv", cache["q", 0][:, -1], state)
        expected = torch.einsum("bhv,hvm->bm", z, model.blocks[0].attn.W_O)[:, 4:]
        torch.testing.assert_close(zeroed[:, -1], expected, rtol=1e-9, atol=1e-12)
    else:
        assert not zeroed[:, -1].any()


@pytest.mark.parametrize("rule", RECURRENT)
def test_the_loss_at_every_position_and_its_gradient(rule: str):
    config = ExperimentConfig(
        task=TaskConfig(d_x=4, context_length=6),
        model=ModelConfig(n_heads=2, score=rule, gates="token"),
        train=TrainConfig(loss="every"),
    )
    weights = initial_deep_weights(config).to(torch.float64)
    prompts = draw_prompts(config.task, 16, dtype=torch.float64)
    loss, gradients = loss_and_gradients(weights, prompts, first_counted=1)
    cut = [prompts.prefix(length) for length in range(1, 7)]
    alone = [(predictions(weights, each) - each.y_query).square().mean() for each in cut]
    torch.testing.assert_close(loss, torch.stack(alone).mean(), rtol=1e-12, atol=0)
    step = 1e-6
    for name, gradient in gradients.tensors.items():
        at = gradient.abs().flatten().argmax()
        moved = []
        for sign in (1, -1):
            tensor = weights.tensors[name].clone()
            tensor.view(-1)[at] += sign * step
            changed = weights.with_tensors({name: tensor})
            errors = predictions_at_every(changed, prompts) - prompts.y_of_every_x
            moved.append(errors.square().mean((0, 2))[1:].mean())
        slope = (moved[0] - moved[1]).item() / (2 * step)
        assert gradient.flatten()[at].item() == pytest.approx(slope, rel=1e-4), name


def test_gates_start_as_the_config_says():
    for start, expected in ((0.9, 0.9), (1, 1.0)):
        model = ModelConfig(n_heads=1, score="gated", gate_start=start)
        weights = initial_deep_weights(ExperimentConfig(model=model))
        gate = torch.sigmoid(weights.tensors["attn.b_gate"])
        torch.testing.assert_close(gate, torch.full_like(gate, expected), rtol=1e-6, atol=0)
        assert not weights.W_O[..., :5].any()


def test_masked_heads_are_equal_by_weights_and_by_hooks():
    model = random_model(n_layers=2, n_heads=2, score="gated_delta", d_model=8)
    prompts = prompts_of(model)
    masks = [[], [(0, 1)], [(1, 0)], [(0, 0), (1, 1)]]
    by_weights = predictor_of(model.weights).run(prompts, masks, method="mean")
    hooked = predictor_of(model)
    handle = model.blocks[0].register_forward_hook(lambda *_: None)
    assert hooked.is_hooked
    by_hooks = hooked.run(prompts, masks, method="mean")
    handle.remove()
    assert_close_to_rounding(by_weights, by_hooks)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"score": "gated", "gate_start": 0.0}, ("model.gate_start", "(0, 1]", "0.0")),
        ({"score": "gated", "gate_start": 1.5}, ("model.gate_start", "(0, 1]", "1.5")),
        ({"score": "delta", "gate_start": 0.5}, ("model.gate_start", "delta", "no gate")),
        ({"score": "softmax", "gates": "token"}, ("model.gates", "softmax", "no gate")),
        ({"score": "mesa", "gates": "vector"}, ("model.gates", "constant", "token", "vector")),
        ({"score": "gated", "context_only": True}, ("model.context_only", "gated")),
        ({"score": "delta", "merged_qk": True}, ("model.merged_qk", "delta")),
    ],
)
def test_configs_are_refused_in_one_line(settings: dict, words: tuple[str, ...]):
    with refused(*words):
        ModelConfig(**settings)


def test_a_weight_that_the_gates_lack_is_named():
    own = random_model(n_layers=1, score="gated").weights
    without = {name: t for name, t in own.tensors.items() if name != "attn.b_gate"}
    with refused("attn.b_gate", "missing"):
        Weights(own.model, 4, 1, without)
