"""The model as nn.Linear predicts what the hooked model predicts, on every architecture, and trains."""

import pytest
import torch
from torch import nn

from mechinterp import load
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import sample_prompts
from tests.conftest import CHECKPOINTS, assert_close_to_rounding
from tests.models.test_layered_hooks import random_model

ARCHITECTURES = {
    "attention alone": {},
    "linear scores": {"score": "linear/L", "context_only": True},
    "merged": {"score": "linear/L", "merged_qk": True, "d_model": 4},
    "norm before, MLP, biases": {
        "norm": "before",
        "final_norm": True,
        "d_mlp": 7,
        "biases": True,
        "d_model": 8,
    },
    "norm after, MLP": {"norm": "after", "d_mlp": 7, "d_model": 8},
    "x and y in turn, positions": {"layout": "in_turn", "n_positions": 30, "d_model": 8},
    "rotary": {"layout": "in_turn", "rotary_dim": 4, "d_model": 8},
    "read-in of two layers": {"d_read_in": 5, "d_model": 8},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_predicts_the_same(kind: str):
    model = random_model(**ARCHITECTURES[kind])
    module = model.as_linear_module()
    prompts = sample_prompts(TaskConfig(d_x=3, d_y=2, context_length=9), 7, dtype=torch.float64)
    with torch.no_grad():
        assert_close_to_rounding(module(prompts), model(model.tokens(prompts)))
    names = {
        name.split(".")[-1] for name, each in module.named_modules() if type(each) is nn.Linear
    }
    assert {"q", "k", "v", "o"} <= names
    assert not {"ln1.w", "W_Q"} & {name for name, _ in module.named_parameters()}


def test_shipped_weights_and_gradients():
    model = load(CHECKPOINTS / "softmax-h2-s0").model
    module = model.as_linear_module()
    prompts = sample_prompts(TaskConfig(), 32)
    torch.testing.assert_close(module(prompts)[:, -1], model.predict(prompts))
    loss = model.loss_fn(module(prompts), prompts.y_query)
    loss.backward()
    grad = module.blocks[0].attn.q.weight.grad
    model(prompts, return_type="loss").backward()
    expected = model.blocks[0].attn.W_Q.grad.permute(1, 0, 2).flatten(1).mT
    torch.testing.assert_close(grad, expected)
    # A copy: the module does not change the model.
    assert module.blocks[0].attn.q.weight.data_ptr() != model.W_Q.data_ptr()
