"""Recurrent layers of transformers and flash-linear-attention as hooked modules: heads are found, and the hook points of
their parts carry what the layer computes."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from mechinterp import TaskConfig, ablate, attention_patterns, hook_module, response
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.recurrence import Memory

TASK = TaskConfig(d_x=3, context_length=7)
WIDTH, HEADS, D_K, D_V = 12, 4, 5, 6


def settings(n_keys: int) -> dict[str, object]:
    """Sizes of a layer in the words of transformers' configs."""
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "linear_num_key_heads": n_keys,
        "linear_num_value_heads": HEADS,
        "linear_key_head_dim": D_K,
        "linear_value_head_dim": D_V,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention"],
    }


class Norm(nn.Module):
    """Root mean square norm, with a gate if the layer has one."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(width))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:], self.weight)
        return normed if gate is None else normed * F.silu(gate)


class FlashLinear(nn.Module):
    """A layer with the names of flash-linear-attention's, computed token by token."""

    def __init__(self, rule: str, *, conv: str = ""):
        """`conv` has those of q, k and v that go through a short convolution."""
        super().__init__()
        self.rule, self.num_heads = rule, HEADS
        for name, width in {"q": D_K, "k": D_K, "v": D_V}.items():
            setattr(self, f"{name}_proj", nn.Linear(WIDTH, HEADS * width, bias=False))
            if name in conv:
                channels = HEADS * width
                layer = nn.Conv1d(channels, channels, 3, groups=channels, padding=2, bias=False)
                setattr(self, f"{name}_conv1d", layer)
        if rule == "gated by channel":
            self.gk_proj = nn.Sequential(nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, HEADS * D_K))
            self.gate_logit_normalizer = 2
        elif rule == "gated":
            self.gk_proj, self.gate_logit_normalizer = nn.Linear(WIDTH, HEADS), 16
        else:
            self.b_proj = nn.Linear(WIDTH, HEADS)
        if rule == "mesa":
            self.a_proj, self.lambda_lower_bound = nn.Linear(WIDTH, HEADS), 0.25
            self.lambda_params = nn.Parameter(torch.randn(HEADS * D_K))
        self.g_proj = nn.Linear(WIDTH, HEADS * D_V)
        self.o_norm, self.o_proj = Norm(D_V), nn.Linear(HEADS * D_V, WIDTH, bias=False)

    @property
    def gates(self) -> tuple[str, ...]:
        return {"delta": ("b",), "mesa": ("a", "b")}.get(self.rule, ("gk",))

    def channel(self, name: str, x: Tensor) -> Tensor:
        values = getattr(self, f"{name}_proj")(x)
        conv = getattr(self, f"{name}_conv1d", None)
        if conv is not None:
            values = F.silu(conv(values.mT)[..., : x.shape[1]].mT)
        elif name == "v" and self.rule == "delta":
            values = F.silu(values)
        return values.unflatten(-1, (HEADS, -1))

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        q, k, v = (self.channel(name, x) for name in "qkv")
        if not self.rule.startswith("gated"):
            q, k = (
                each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k)
            )
        gates = {name: getattr(self, f"{name}_proj")(x) for name in self.gates}
        S = H = x.new_zeros(())
        outputs = []
        for t in range(x.shape[1]):
            key, value, query = k[:, t, :, :, None], v[:, t, :, None], q[:, t, :, None]
            if self.rule.startswith("gated"):
                gate = (F.logsigmoid(gates["gk"][:, t]) / self.gate_logit_normalizer).exp()
                S = gate.unflatten(-1, (HEADS, -1))[..., None] * S + key * value
                outputs.append(query @ S / D_K**0.5)
                continue
            beta = torch.sigmoid(gates["b"][:, t])[..., None, None]
            if self.rule == "delta":
                S = S + beta * key * (value - (key.mT @ S if t else 0))
                outputs.append(query @ S / D_K**0.5)
                continue
            gate = torch.sigmoid(gates["a"][:, t])[..., None, None]
            H, S = gate * H + beta * key * key.mT, gate * S + beta * key * value
            ridge = (F.softplus(self.lambda_params) + 0.25).unflatten(0, (HEADS, -1))
            outputs.append(query @ torch.linalg.solve(H + torch.diag_embed(ridge), S))
        z = torch.stack(outputs, 1)[:, :, :, 0]
        z = self.o_norm(z, self.g_proj(x).unflatten(-1, (HEADS, -1)))
        return self.o_proj(z.flatten(2)), None, None


MIXED = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
LAYERS = {
    "Qwen3-Next": lambda: qwen.Qwen3NextGatedDeltaNet(Qwen3NextConfig(**settings(2)), 0),
    "Qwen3.5": lambda: qwen35.Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**settings(2)), 0),
    "OLMo Hybrid": lambda: olmo.OlmoHybridGatedDeltaNet(OlmoHybridConfig(**settings(4) | MIXED), 0),
    "DeltaNet": lambda: FlashLinear("delta", conv="qkv"),
    "DeltaNet, no convolution": lambda: FlashLinear("delta"),
    "SimpleGatedLinearAttention": lambda: FlashLinear("gated"),
    "GatedLinearAttention": lambda: FlashLinear("gated by channel"),
    "MesaNet": lambda: FlashLinear("mesa"),
}
OUTPUT = {"Qwen3-Next": "out_proj", "Qwen3.5": "out_proj"}


class Model(nn.Module):
    """Layers with read-in and read-out on tokens (x, y)."""

    def __init__(self, name: str, n_layers: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.read_in, self.read_out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(LAYERS[name]() for _ in range(n_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.read_in(tokens)
        for layer in self.layers:
            output = layer(stream)
            stream = stream + (output[0] if isinstance(output, tuple) else output)
        return self.read_out(stream)[:, -1]


def prompts() -> Prompts:
    return draw_prompts(TASK, 5, dtype=torch.float32)


def norm_of(module: nn.Module) -> nn.Module:
    layer = module.layers[0]
    return getattr(layer, "o_norm", None) or layer.norm


@pytest.mark.parametrize("name", LAYERS)
def test_heads_are_found_and_the_pattern_times_v_is_what_the_norm_gets(name: str):
    model, drawn = Model(name).eval(), prompts()
    hooked = hook_module(model, task=TASK)
    assert hooked.outputs == (f"layers.0.{OUTPUT.get(name, 'o_proj')}",)
    assert (hooked.hooked.n_layers, hooked.hooked.n_heads) == (1, HEADS)
    assert hooked.model.unfollowed == {}
    assert torch.equal(model(hooked.hooked.inputs(drawn)), hooked.predict(drawn))
    got = []
    with norm_of(hooked.model.module).register_forward_pre_hook(
        lambda _, args: got.append(args[0])
    ):
        hooked.predict(drawn)
        output, cache = hooked.hooked.run_noting(
            hooked.hooked.inputs(drawn), [*hooked.model.hook_dict]
        )
    assert torch.equal(got[0], got[1])  # hooks that only read change no bit
    assert torch.equal(output, hooked.predict(drawn))
    part = {each: cache.get(f"blocks.0.attn.hook_{each}") for each in ("q", "k", "v", "pattern")}
    z = torch.einsum("bhqk,bkhd->bqhd", part["pattern"], part["v"])
    torch.testing.assert_close(z, got[0].reshape(z.shape), rtol=1e-5, atol=1e-5)
    assert part["q"].shape == part["k"].shape == (5, 8, HEADS, D_K)
    table = attention_patterns(hooked, drawn).to_frame()
    assert len(table) > 0


@pytest.mark.parametrize("name", LAYERS)
def test_changed_parts_give_the_recurrence_of_the_changed_parts(name: str):
    hooked, drawn = hook_module(Model(name), task=TASK), prompts()
    inputs, other = (
        hooked.hooked.inputs(each)
        for each in (drawn, draw_prompts(TASK, 5, seed=1, dtype=torch.float32))
    )
    names = [each for each in hooked.model.hook_dict if ".attn." in each and "hook_z" not in each]
    names = [each for each in names if "pattern" not in each]
    _, theirs = hooked.hooked.run_noting(other, names)
    z: list[Tensor] = []
    put = [(each, lambda _, hook: theirs[hook.name]) for each in names]
    note = norm_of(hooked.model.module)
    # A hook of the layer's own norm comes after those of the package.
    with note.register_forward_pre_hook(lambda _, args: z.append(args[0])):
        hooked.hooked.run(other)
        hooked.hooked.run(inputs, put)
    torch.testing.assert_close(z[1], z[0], rtol=1e-4, atol=1e-5)
    # One part alone: strengths or gates of 0 at every token but the first leave a known state.
    which = "beta" if "blocks.0.attn.hook_beta" in names else "gate"
    _, own = hooked.hooked.run_noting(inputs, names)
    changed = own[f"blocks.0.attn.hook_{which}"].clone()
    changed[:, 1:] = 0.25
    z.clear()
    with note.register_forward_pre_hook(lambda _, args: z.append(args[0])):
        hooked.hooked.run(inputs, [(f"blocks.0.attn.hook_{which}", lambda _, hook: changed)])
    parts = {each.rpartition("_")[2]: value for each, value in own.items()} | {which: changed}
    delta = hooked.model.blocks[0].attn.delta
    assert delta is not None
    if delta.rule != "mesa":
        memory = Memory(
            delta.rule, parts["k"], parts["v"], parts.get("gate"), parts.get("beta"), None
        )
        expected = memory.read(parts["q"] / D_K**0.5, range(1, 9))
        torch.testing.assert_close(z[0].reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_analyses_run_on_a_layer_of_transformers():
    hooked = hook_module(Model("Qwen3-Next", n_layers=2), task=TASK)
    assert hooked.hooked.n_layers == 2
    assert ablate(hooked, n_prompts=64).to_frame().notna().any(axis=None)
    assert response(hooked, n_prompts=256).reading
    drawn = prompts()
    masked = hooked.predictor.run(drawn, [[], [(0, 0)], [(1, 3)]])
    assert (masked[1:] - masked[0]).abs().amax((1, 2)).min() > 1e-4
    without = [("blocks.0.attn.hook_v", lambda v, hook: v * (torch.arange(HEADS) > 0)[:, None])]
    output = hooked.hooked.run(hooked.hooked.inputs(drawn), without)
    # The norm of zeros is zero, so that a head without values is a masked head.
    torch.testing.assert_close(output, masked[1], rtol=1e-4, atol=1e-5)


def test_copies_use_their_own_hook_points():
    hooked = hook_module(Model("Qwen3.5"), task=TASK)
    other, drawn = copy.deepcopy(pickle.loads(pickle.dumps(hooked))), prompts()
    before = other.predict(drawn)
    point = hooked.model.blocks[0].attn.hook_gate
    point.add_hook(lambda gate, hook: 0 * gate)
    assert torch.equal(other.predict(drawn), before)
    assert not torch.equal(hooked.predict(drawn), before)


class Rectified(FlashLinear):
    """A layer with relu where flash-linear-attention has silu."""

    def channel(self, name: str, x: Tensor) -> Tensor:
        return F.relu(getattr(self, f"{name}_proj")(x)).unflatten(-1, (HEADS, -1))


def test_another_recurrence_gets_no_points_by_its_names():
    model = Model("DeltaNet, no convolution")
    model.layers[0] = Rectified("delta")
    hooked = hook_module(model, task=TASK)
    assert hooked.model.blocks[0].attn.delta is None
    assert 0 in hooked.model.unfollowed
    assert "blocks.0.attn.hook_beta" not in hooked.model.hook_dict
