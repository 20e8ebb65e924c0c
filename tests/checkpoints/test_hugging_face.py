"""A native folder is what Hugging Face's tools expect: their own loaders read it, and it goes through a save unchanged."""

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_model

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.config import from_dict
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.hooked.transformer import ICLTransformer

FOLDERS = ["checkpoints/softmax-h2-s0", "checkpoints/two-tasks-h3-s0", "checkpoints/tanh-h2-s0"]


class Pretrained(ICLTransformer, PyTorchModelHubMixin):
    """What a user of huggingface_hub writes: the mixin reads config.json and model.safetensors by itself."""

    def __init__(self, experiment: dict):
        config = from_dict(experiment)
        super().__init__(config.model, d_x=config.task.d_x, d_y=config.task.d_y)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_hubs_mixin_loads_the_folder(folder: str):
    checkpoint = Checkpoint.from_pretrained(folder)
    prompts = sample_prompts(checkpoint.config.task, 8, seed=0)
    model = Pretrained.from_pretrained(folder)
    assert torch.equal(model.predict(prompts), checkpoint.model.predict(prompts))


def test_safetensors_loads_every_tensor_strictly():
    checkpoint = Checkpoint.from_pretrained("checkpoints/softmax-h2-s0")
    expected = {name: tensor.clone() for name, tensor in checkpoint.model.state_dict().items()}
    for parameter in checkpoint.model.parameters():
        parameter.data.zero_()
    missing, unexpected = load_model(checkpoint.model, checkpoint.path / "model.safetensors")
    assert not missing
    assert not unexpected
    state = checkpoint.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
