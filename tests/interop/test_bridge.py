"""TransformerLens 4's own tiny model, booted from a config, takes our weights, and we take its."""

from pathlib import Path

import pytest
import torch
import transformer_lens.model_bridge.sources  # noqa: F401
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.config.model import NAMES
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.models.heads import predict
from mechinterp.training.one_layer.step import initial_weights
from tests.checkpoints.files import read as load

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, d_y=2, context_length=8), model=ModelConfig(n_heads=2, d_head=4)
)


@pytest.fixture
def bridge() -> TransformerBridge:
    """TransformerLens 4's own model of this shape, its mask made strict."""
    cfg = TransformerBridgeConfig(
        n_layers=1,
        d_model=5,
        d_head=4,
        n_heads=2,
        n_ctx=16,
        d_vocab=2,
        d_vocab_out=2,
        attn_only=True,
        normalization_type=None,
        device="cpu",
        default_prepend_bos=False,
    )
    bridge = TransformerBridge.boot_native(cfg)
    attn = bridge.original_model.layers[0].attn.original_component
    attn.causal_mask = torch.ones(16, 16, dtype=torch.bool).triu()  # True blocks
    return bridge


def test_a_bridge_takes_our_weights_and_gives_them_back(bridge: TransformerBridge, tmp_path: Path):
    prompts = draw_prompts(CONFIG.task, 32, generator=generator_for(0, "eval", 0))
    weights = initial_weights(CONFIG)
    state = convert_tl_checkpoint(hooked_state(weights, n_ctx=16), bridge.cfg)
    bridge.load_state_dict(state, strict=True)
    with torch.no_grad():
        y_hat = bridge(prompts.tokens.clone(), start_at_layer=0)[:, -1]
    assert y_hat.std() > 0.01
    torch.testing.assert_close(y_hat, predict(weights, prompts), rtol=0, atol=1e-5)
    torch.save(dict(bridge.tl_parameters()), tmp_path / "bridge.pt")
    back = load(tmp_path / "bridge.pt").weights
    assert all(torch.equal(getattr(back, name), getattr(weights, name)) for name in NAMES)


def test_we_take_the_weights_of_a_bridge(bridge: TransformerBridge, tmp_path: Path):
    prompts = draw_prompts(CONFIG.task, 32, generator=generator_for(0, "eval", 0))
    parameters = bridge.tl_parameters()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.zero_() if name.split(".")[-1] not in NAMES else tensor.normal_(
                generator=generator
            )
        parameters["blocks.0.attn.W_O"][:, :, :3] = 0
        parameters["unembed.W_U"][3:] = torch.eye(2)
        y_hat = bridge(prompts.tokens.clone(), start_at_layer=0)[:, -1]
    torch.save(dict(bridge.tl_parameters()), tmp_path / "bridge.pt")
    weights = load(tmp_path / "bridge.pt").weights
    assert not weights.W_Q.requires_grad
    assert y_hat.std() > 0.1
    torch.testing.assert_close(predict(weights, prompts), y_hat, rtol=1e-5, atol=1e-5)
