"""Models of Hugging Face under our hooks: rises are those of masks by hand, and patterns are those that the model returns."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from mechinterp import TaskConfig, ablate, attention_patterns, hook_module
from mechinterp.icl.prompts import draw_prompts

TASK = TaskConfig(d_x=3, context_length=6)
SIZES = {
    "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 8,
    "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
SINK = "a learned sink: no points"
FAMILIES = {
    # family: settings, the output projections' names, and the hook points of queries, keys and values that stay
    "Llama": (GROUPED, "self_attn.o_proj", "qv"),
    "Qwen3": ({"num_key_value_heads": 4, "head_dim": 4}, "self_attn.o_proj", "qkv"),  # normed head by head
    "GPT2": ({}, "attn.c_proj", "qkv"),  # queries, keys and values from one Conv1D
    "Phi": ({}, "self_attn.dense", "qkv"),
    "GPTNeoX": ({}, "attention.dense", "qkv"),
    "Bloom": ({"n_head": 4, "n_layer": 2}, "self_attention.dense", "qkv"),
    "Falcon": ({"multi_query": False}, "self_attention.dense", "qkv"),
    "Bert": ({}, "attention.output.dense", "qkv"),
    "Olmo2": ({}, "self_attn.o_proj", "v"),  # norms over all heads mix their queries and keys
    "GptOss": (GROUPED | {"head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1}, "self_attn.o_proj", SINK),
    "DeepseekV3": (
        {"hidden_size": 32, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
         "v_head_dim": 8, "first_k_dense_replace": 2, "num_key_value_heads": 4},
        "self_attn.o_proj",
        "",
    ),
}  # fmt: skip


class Regression(nn.Module):
    def __init__(self, family: str, settings: dict):
        super().__init__()
        config = getattr(transformers, f"{family}Config")(**SIZES | settings)
        config._attn_implementation = "eager"
        width = config.hidden_size
        self.read_in, self.read_out = nn.Linear(4, width), nn.Linear(width, 1)
        self.backbone = getattr(transformers, f"{family}Model")(config)

    def run(self, tokens):
        return self.backbone(inputs_embeds=self.read_in(tokens), output_attentions=True)

    def forward(self, tokens):
        return self.read_out(self.run(tokens).last_hidden_state)


def without(z: torch.Tensor, head: int) -> torch.Tensor:
    z = z.unflatten(-1, (4, -1)).clone()
    z[..., head, :] = 0
    return z.flatten(-2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_rises_and_patterns_are_those_of_the_model_itself(family):
    settings, output, points = FAMILIES[family]
    torch.manual_seed(0)
    # GPT-OSS does not run in float64.
    dtype, close = torch.float64, {"rtol": 1e-6, "atol": 1e-9}
    if points == SINK:
        dtype, close = torch.float32, {"rtol": 1e-3, "atol": 1e-6}
    model = Regression(family, settings).to(dtype).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.3)
    prompts = draw_prompts(TASK, 32, seed=1, dtype=dtype)
    hooked = hook_module(model, task=TASK)

    def risk() -> float:
        return (model(prompts.tokens)[:, -1] - prompts.y_query_clean).square().mean().item()

    full, rises = risk(), []
    for projection in (part for name, part in model.named_modules() if name.endswith(output)):
        for head in range(4):
            mask = projection.register_forward_pre_hook(
                lambda _, args, head=head: without(args[0], head)
            )
            rises.append(risk() - full)
            mask.remove()
    np.testing.assert_allclose(ablate(hooked, prompts, what="heads").rise.ravel(), rises, **close)
    expected = torch.cat(model.run(prompts.tokens).attentions, dim=1)[:, :, -1]
    patterns = attention_patterns(hooked, prompts, shown=len(prompts)).pattern
    np.testing.assert_allclose(patterns, expected, **close)
    there = "".join(x for x in "qkv" if f"blocks.1.attn.hook_{x}" in hooked.model.hook_dict)
    assert there == ("" if points == SINK else points)
