"""Models on which TransformerLens' tools are run, and what the checks share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import load
from mechinterp.config import SCORES
from mechinterp.models.hooked.transformer import ICLTransformer
from tests import deep_models
from tests.conftest import CHECKPOINTS, sampled

GPT2 = {**deep_models.GPT2, "d_model": 12}
MODELS: dict[str, dict] = {
    **{f"{n} of {score}": {"n_layers": n, "score": score} for n in (1, 2) for score in SCORES},
    "merged": {"n_layers": 1, "merged_qk": True, "d_head": 5},
    "merged, linear": {"merged_qk": True, "d_head": 5, "score": "linear/L"},
    "norm": {"norm": "before", "final_norm": True},
    "MLP": {"d_mlp": 7},
    "norm, MLP, biases": {"norm": "before", "final_norm": True, "d_mlp": 7, "biases": True},
    "no last norm": {"norm": "before", "d_mlp": 7},
    "positions": {"n_positions": 9},
    "last norm alone": {"final_norm": True},
    "norms after each layer": {
        **{"norm": "after", "d_mlp": 7, "biases": True},
        **{"context_only": True, "attend_to_self": True},
    },
    "GPT-2": {**GPT2, "n_positions": 40},
    "GPT-2 with fewer positions than entries": {**GPT2, "n_positions": 9},
    "itself": {"attend_to_self": True},
    "all tokens read all": {"attend_to_self": True, "context_only": True},
    "read-in, linear": {"context_only": True, "score": "linear/L", "d_model": 7},
    "rectified": {"context_only": True, "score": "relu/L"},
}
SHIPPED = ("softmax-h1-s0", "softmax-h8-s0")
SAMPLE = ("1 of softmax", "merged, linear", "GPT-2", "read-in, linear")


@pytest.fixture(params=sampled([*MODELS, *SHIPPED], keep=SAMPLE.__contains__))
def model(request: pytest.FixtureRequest) -> ICLTransformer:
    """Three heads a layer for d_x = 3 and d_y = 2, all weights random; or a shipped model."""
    if request.param in SHIPPED:
        return load(CHECKPOINTS / request.param).model
    sizes, given = {"d_x": 3, "d_y": 2, "n_ctx": 10}, {"n_layers": 2, "n_heads": 3}
    given |= {"d_head": 4, "score_slope": 0.1} | MODELS[request.param]
    return deep_models.random_model(sizes=sizes, std=0.4, **given)


def sample_inputs(
    model: ICLTransformer,
) -> tuple[Float[Tensor, "batch pos d"], Float[Tensor, "batch pos d"]]:
    """Clean and corrupted random inputs, with sizes that differ between axes so that swapped axes are noticed."""
    cfg = model.cfg
    generator = torch.Generator().manual_seed(0)
    # At most the model's positions, and fewer than n_ctx, which some tools require.
    n_pos = min(cfg.d_model + 2, cfg.model.n_positions or cfg.n_ctx, cfg.n_ctx - 1)
    # With a read-in, tokens and stream differ in width.
    shape = (2, 3, n_pos, cfg.d_token)
    clean, corrupted = torch.randn(*shape, generator=generator, dtype=torch.float32).to(cfg.dtype)
    return clean, corrupted


def assert_close(values: Tensor, expected: Tensor) -> None:
    """Equal to 1e-4 of the largest entry, or to 1e-4 where all are below 1."""
    off = (values.double() - expected.double()).abs().max().item()
    assert values.shape == expected.shape
    assert off <= 1e-4 * max(1.0, expected.abs().max().item())


def require_sum(model: ICLTransformer) -> None:
    """Skips a test that needs a stream which is the sum of the parts that write to it."""
    if model.cfg.model.norm == "after":
        pytest.skip("with norms after each layer the stream is no sum of its parts")


def replace_at(index: tuple, value: Tensor | float) -> Callable[[Tensor, object], Tensor]:
    """Hook that replaces this index of a copy by the value, or by the value's entries at the same index."""

    def hook(values: Tensor, hook: object) -> Tensor:
        values = values.clone()
        values[index] = value[index] if isinstance(value, Tensor) else value
        return values

    return hook


@contextmanager
def switched_on(model: ICLTransformer, *switches: str) -> Iterator[None]:
    """Context in which `cfg.use_...` switches are on; they are off afterwards."""
    for switch in switches:
        getattr(model, f"set_{switch}")(True)
    yield
    for switch in switches:
        getattr(model, f"set_{switch}")(False)
