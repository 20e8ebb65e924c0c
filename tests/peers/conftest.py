"""The examples of docs/peers.md, to be run, and a model of two layers for each library."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mechinterp.config import ModelConfig
from mechinterp.icl.prompts import generator_for
from mechinterp.models.heads import predict
from mechinterp.models.hooked.masks import mask_heads
from mechinterp.models.hooked.transformer import ICLTransformer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "peers.md"


@pytest.fixture
def run_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict]:
    """Names defined by the code under a heading of the page, run after that of the first heading."""

    def run(heading: str) -> dict:
        sections = code_by_heading(PAGE.read_text())
        first, *_ = sections.values()
        # A file, since nnsight reads the source of the block it traces.
        file = tmp_path / f"{heading}_example.py"
        file.write_text(first + sections[heading])
        monkeypatch.chdir(ROOT)
        return runpy.run_path(str(file))

    return run


@pytest.fixture
def assert_masked() -> Callable[[dict], None]:
    """What an example left behind: a masked prediction like ours, and a model that is as it was."""

    def check(names: dict) -> None:
        model, prompts = names["model"], names["prompts"]
        expected = names["masked_by_hooks"](1)
        torch.testing.assert_close(names["masked"], expected, rtol=0, atol=1e-6)
        full = predict(names["checkpoint"].weights, prompts)
        assert (full - expected).abs().max() > 0.1
        torch.testing.assert_close(model.predict(prompts), full, rtol=0, atol=1e-5)
        assert not model.training
        assert all(weights.requires_grad for weights in model.parameters())

    return check


@pytest.fixture
def deep_model() -> ICLTransformer:
    """Two layers of three heads, two responses, all weights random, in float64."""
    model = ICLTransformer(ModelConfig(n_heads=3, n_layers=2, d_head=4), d_x=3, d_y=2)
    generator = generator_for(0, "init", 0)
    for weights in model.to(torch.float64).parameters():
        torch.nn.init.normal_(weights, std=0.5, generator=generator)
    return model.eval()


@pytest.fixture
def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(6, 9, 5, generator=generator, dtype=torch.float64)


@pytest.fixture
def masked_in_both_layers(deep_model: ICLTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """Output of the deep model without head 2 of layer 0 and head 0 of layer 1, by our hooks."""
    with torch.no_grad():
        masked = deep_model.run_with_hooks(tokens, fwd_hooks=mask_heads([(0, 2), (1, 0)]))
        assert (deep_model(tokens) - masked).abs().max() > 0.1
    return masked


def code_by_heading(page: str) -> dict[str, str]:
    code = {}
    for section in page.split("\n## ")[1:]:
        heading, body = section.split("\n", 1)
        code[heading] = "\n".join(re.findall(r"```python\n(.*?)```", body, flags=re.DOTALL))
    return code
