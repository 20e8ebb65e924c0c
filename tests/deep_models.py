"""Models of several layers with random weights: ours, and somebody else's in a Bridge."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pandas as pd
import torch
from torch import nn

from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.layers import interleaved

TRAIN = TrainConfig()
WIDE = {"context_only": True, "d_model": 12, "d_head": 3}
GPT2 = {
    **{"norm": "before", "final_norm": True, "biases": True, "attend_to_self": True, "d_model": 8},
    **{"d_mlp": 7, "activation": "gelu_new", "layout": "in_turn"},
}
"""An architecture that has all that GPT-2's has but for the number of positions."""


def random_model(
    n_layers: int = 3,
    n_heads: int = 4,
    *,
    sizes: Mapping[str, int] = MappingProxyType({"d_x": 4, "d_y": 1}),
    std: float = 0.3,
    **architecture: object,
) -> ICLTransformer:
    """A model, of d_x = 4 if nothing is said, whose every weight is N(0, std^2), in float64."""
    model = ICLTransformer(
        ModelConfig(n_layers=n_layers, n_heads=n_heads, **architecture), **sizes
    ).double()
    generator = torch.Generator().manual_seed(n_layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std, generator=generator)
    return model.eval()


def small_gpt2(**settings: object) -> nn.Module:
    """Hugging Face's GPT-2 of two layers of two heads and 19 positions, which drops nothing at random."""
    from transformers import GPT2Config, GPT2Model

    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 19, "initializer_range": 0.3}
    sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    words = {"vocab_size": 1, "bos_token_id": None, "eos_token_id": None}
    return GPT2Model(GPT2Config(**sizes | words | settings))


def gpt2_predictor(backbone: nn.Module, read_in: nn.Module, read_out: nn.Linear) -> HookedPredictor:
    """A regression GPT-2 in a Bridge, which wraps the backbone in place."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import GPT2LMHeadModel

    with_head = GPT2LMHeadModel(backbone.config)
    with_head.transformer, with_head.lm_head = backbone, read_out
    with_head.config.tie_word_embeddings = False
    with_head.set_attn_implementation("eager")
    with_head.eval()
    read_in.eval()
    bridge = build_bridge_from_module(with_head, "GPT2LMHeadModel", hf_config=with_head.config)
    return HookedPredictor(
        bridge,
        bridge.cfg.n_layers,
        bridge.cfg.n_heads,
        embed=lambda prompts: read_in(interleaved(prompts).to(next(read_in.parameters()))),
        read=lambda output: output[:, -1],
    )


def random_gpt2() -> HookedPredictor:
    """A regression GPT-2 of 3 layers of 2 heads, with norms and MLPs, for d_x = 4 and up to 9 pairs."""
    backbone = small_gpt2(n_layer=3)
    read_in, read_out = nn.Linear(4, 8), nn.Linear(8, 1)
    generator = torch.Generator().manual_seed(0)
    for part in (backbone, read_in, read_out):
        for name, parameter in part.named_parameters():
            if "ln_" not in name:
                nn.init.normal_(parameter, std=0.3, generator=generator)
    return gpt2_predictor(backbone.double(), read_in.double(), read_out.double())


def wide_checkpoint(folder: Path, train: TrainConfig = TRAIN) -> Checkpoint:
    """Three layers of four softmax heads at random, said to be trained for 5 steps."""
    weights = random_model(**WIDE).weights
    config = ExperimentConfig(TaskConfig(d_x=4, context_length=9), weights.model, train)
    save(folder, config, weights, step=5)
    return load(folder)


def descent_checkpoint(folder: Path) -> Checkpoint:
    """Two layers that each take a step of gradient descent, with a history and snapshots of two equal steps."""
    weights = gradient_descent_model([0.5, 0.3], d_x=4)
    config = ExperimentConfig(task=TaskConfig(d_x=4, context_length=8), model=weights.model)
    rows = [(step, layer, 0) for step in (0, 1) for layer in (0, 1)]
    history = pd.DataFrame(rows, columns=["step", "layer", "head"])
    history = history.assign(loss=1.0, eval_loss=1.0, qk_norm=1.0, ov_norm=1.0)
    kept = {0: weights, 1: weights}
    save(folder / "descent", config, weights, step=1, history=history, snapshots=kept)
    return load(folder / "descent")


def first_prediction(logits: torch.Tensor) -> torch.Tensor:
    """Metric: prediction of the query's first response."""
    return logits[:, -1, 0]


def first_response(predictions: torch.Tensor, prompts: Prompts) -> torch.Tensor:
    """Metric: prediction of the query's first response."""
    return predictions[:, 0]
