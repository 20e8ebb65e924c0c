"""Our models pass every check, and breaking any one guarded behaviour makes its check fail."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mechinterp import load
from mechinterp.config import SCORES
from mechinterp.models.hooked import blocks
from mechinterp.models.hooked.transformer import ICLTransformer
from tests import deep_models
from tests.conformance.check import CHECKS, failures
from tests.conftest import sampled

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def random_model(
    cls: type[ICLTransformer] = ICLTransformer,
    *,
    n_layers: int = 2,
    merged_qk: bool = False,
    **architecture: object,
) -> ICLTransformer:
    """Three heads for d_x = 3, d_y = 2, of which all weights are random."""
    sizes = {"d_x": 3, "d_y": 2, "n_ctx": 10}
    architecture |= {"merged_qk": merged_qk, "d_head": 5 if merged_qk else 4, "score_slope": 0.1}
    return deep_models.random_model(n_layers, 3, kind=cls, sizes=sizes, std=0.4, **architecture)


GPT2 = {**deep_models.GPT2, "d_model": 12}
MODELS: dict[str, dict] = {
    **{f"{n} of {score}": {"n_layers": n, "score": score} for n in (1, 2) for score in SCORES},
    "merged": {"n_layers": 1, "merged_qk": True},
    "merged, linear": {"merged_qk": True, "score": "linear/L"},
    "norm": {"norm": "before", "final_norm": True},
    "MLP": {"d_mlp": 7},
    "norm, MLP, biases": {"norm": "before", "final_norm": True, "d_mlp": 7, "biases": True},
    "positions": {"n_positions": 9},
    "last norm alone": {"final_norm": True},
    "GPT-2": {**GPT2, "n_positions": 40},
    "GPT-2 with fewer positions than entries": {**GPT2, "n_positions": 9},
    "itself": {"attend_to_self": True},
    "all tokens read all": {"attend_to_self": True, "context_only": True},
    "read-in, linear": {"context_only": True, "score": "linear/L", "d_model": 7},
    "rectified": {"context_only": True, "score": "relu/L"},
}


SAMPLE = ("1 of softmax", "merged, linear", "GPT-2", "read-in, linear")


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MODELS, keep=lambda name: name in SAMPLE))
def test_our_models_pass_all_checks(name: str):
    assert failures(random_model(**MODELS[name])) == {}
    assert len(CHECKS) == 40


@pytest.mark.slow
def test_what_does_not_apply_is_told():
    after = {"norm": "after", "d_mlp": 7, "biases": True, "context_only": True}
    failed = failures(random_model(**after, attend_to_self=True))
    assert len(failed) == 6
    assert all(reason.startswith("does not apply: norms after") for reason in failed.values())
    failed = failures(random_model(norm="before", d_mlp=7))
    assert set(failed) == {"decomposition into heads, logit_attrs"}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("n_heads", "dtype"), [(1, torch.float64), (8, torch.float32)])
def test_shipped_models_pass_all_checks(n_heads: int, dtype: torch.dtype):
    model = load(CHECKPOINTS / f"softmax-h{n_heads}-s0").model
    assert failures(model.to(dtype)) == {}


class Uncopied(ICLTransformer):
    """Hands the caller's tensor to the hooks."""

    def forward(self, input: Tensor, return_type: str | None = "logits", **kwargs: int) -> Tensor:
        resid = self.hook_embed(self._vectors(input))
        for block in self.blocks:
            resid = block(resid)
        return self.unembed(resid)


def broken(base: type = ICLTransformer, **attributes: object) -> type[ICLTransformer]:
    """A hooked model, some of whose methods or properties are others."""
    return type("Broken", (base,), attributes)


Doubled = broken(
    forward=lambda self, *args, **given: 2 * ICLTransformer.forward(self, *args, **given)
)
"""Adds to the read-out what no part of the model accounts for."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "name", "reason"),
    [
        (Uncopied, "caller's input untouched", "overwrote the caller's input"),
        (Uncopied, "attribution patching: nodes", "does not require grad"),
        (Doubled, "decomposition of the residual stream", "decompose_resid: off by"),
        (Doubled, "decomposition into heads, logit_attrs", "heads and remainder: off by"),
        (Doubled, "logit lens", "the last entry of the lens: off by"),
    ],
)
def test_a_broken_behaviour_fails_its_check(cls: type[ICLTransformer], name: str, reason: str):
    with pytest.raises(Exception, match=re.escape(reason)):
        CHECKS[name](random_model(cls))


def self_attending(scores: Tensor, *, score: str, slope: float) -> Tensor:
    return torch.softmax(scores.masked_fill(torch.eye(scores.shape[-1]) == 1, 0.0), dim=-1)


def not_causal(scores: Tensor, *, score: str, slope: float) -> Tensor:
    return torch.softmax(scores.masked_fill(scores == -torch.inf, 0.0), dim=-1)


def without_care_for_empty_rows(scores: Tensor, *, score: str, slope: float) -> Tensor:
    return torch.softmax(scores, dim=-1).nan_to_num()


def deaf(scores: Tensor, *, score: str, slope: float) -> Tensor:
    return torch.ones_like(scores).tril(-1) / scores.shape[-1]


@pytest.mark.parametrize(
    ("pattern", "name", "reason"),
    [
        (self_attending, "strict mask", "positions of layer 0 attend to themselves"),
        (not_causal, "strict mask", "layer 0 attends to later positions"),
        (without_care_for_empty_rows, "finite gradients", "not finite at blocks.0.attn.hook_attn"),
        (deaf, "edits of the scores", "an edit of hook_attn_scores has no effect"),
    ],
)
def test_a_broken_pattern_fails_its_check(monkeypatch, pattern, name: str, reason: str):
    monkeypatch.setattr(blocks, "attention_pattern", pattern)
    with pytest.raises(AssertionError, match=re.escape(reason)):
        CHECKS[name](random_model())


@pytest.mark.slow
def test_examples_of_the_page_run_as_they_say(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CHECKPOINTS.parent)
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/transformer_lens.md").read_text(), re.S)
    names: dict = {}
    exec("\n".join(blocks), names)
    model, clean, cache = (names[name] for name in ("model", "clean", "cache"))
    assert cache["pattern", 0].shape == (64, 2, 41, 41)
    attributed = cache.logit_attrs(names["heads"], tokens=0)[:, :, -1].sum(0)
    torch.testing.assert_close(attributed, model.predict(clean)[:, 0])
    assert not model.cfg.use_zero_mlp
