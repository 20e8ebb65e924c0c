"""One layer of attention seen through what stands around it."""

from dataclasses import replace

import pytest
import torch

from mechinterp.analysis.one_layer.classify import read_through
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.models.heads import identity_keys
from mechinterp.models.shapes import tensor_shapes
from mechinterp.models.weights import Weights
from tests.conftest import assert_close_to_rounding

TASK = TaskConfig(d_x=3, context_length=8)


@pytest.mark.parametrize("around", [{"d_mlp": 8}, {"d_model": 6}], ids=["MLP", "read-in"])
def test_merged_heads_are_seen_as_separate_ones_with_unit_keys(around: dict[str, int]):
    model = ModelConfig(n_heads=2, merged_qk=True, biases=True, score="linear/L", **around)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in tensor_shapes(model, 3, 1).items()
    }
    merged = Weights.of_names(model, 3, 1, tensors)
    W_QK = tensors.pop("blocks.0.attn.W_QK")
    keys = {"blocks.0.attn.W_Q": W_QK, "blocks.0.attn.W_K": identity_keys(W_QK)}
    separate = Weights.of_names(replace(model, merged_qk=False), 3, 1, tensors | keys)
    (found, r2), (expected, expected_r2) = (read_through(each, TASK) for each in (merged, separate))
    for name, tensor in expected.tensors.items():
        assert_close_to_rounding(found.tensors[name], tensor)
    assert r2 == pytest.approx(expected_r2)
