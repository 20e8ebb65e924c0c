"""Our models pass every check, and breaking any one guarded behaviour makes its check fail."""

import copy
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig

from mechinterp import load
from mechinterp.config import SCORES, ModelConfig
from mechinterp.models.hooked import attention
from mechinterp.models.hooked.attention import Attention
from mechinterp.models.hooked.transformer import ICLTransformer
from tests import deep_models
from tests.conformance import model as conformance_model
from tests.conformance.check import CHECKS, check_conformance
from tests.conformance.requirements import require_close, sample_inputs
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


SAMPLE = ("1 of softmax", "2 of softmax", "merged, linear", "GPT-2", "itself", "read-in, linear")


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MODELS, keep=lambda name: name in SAMPLE))
def test_our_models_pass_all_checks(name: str):
    assert check_conformance(random_model(**MODELS[name])).failures == {}
    assert len(CHECKS) == 40


@pytest.mark.slow
def test_what_does_not_apply_is_told():
    after = {"norm": "after", "d_mlp": 7, "biases": True, "context_only": True}
    failures = check_conformance(random_model(**after, attend_to_self=True)).failures
    assert set(failures) == {
        "decomposition of the residual stream",
        "decomposition into heads, logit_attrs",
        "logit lens",
        "patching: direct paths",
        "attribution patching: edges",
        "faithfulness",
    }
    reason = "does not apply: norms after each layer, the stream is no sum of its parts"
    assert set(failures.values()) == {reason}
    failures = check_conformance(random_model(norm="before", d_mlp=7)).failures
    assert set(failures) == {"decomposition into heads, logit_attrs"}
    assert "does not apply: logit_attrs divides by the scale of a last norm" in str(failures)


@pytest.mark.slow
@pytest.mark.parametrize(("n_heads", "dtype"), [(1, torch.float64), (8, torch.float32)])
def test_shipped_models_pass_all_checks(n_heads: int, dtype: torch.dtype):
    model = load(CHECKPOINTS / f"softmax-h{n_heads}-s0").model
    assert check_conformance(model.to(dtype)).failures == {}


@pytest.mark.slow
def test_checking_leaves_the_model_as_it_was():
    model = random_model()
    model.set_use_attn_result(True)
    fired = []
    model.add_hook("hook_embed", lambda values, hook: fired.append(values.shape[0]))
    before, switches = copy.deepcopy(model.state_dict()), copy.deepcopy(vars(model.cfg))
    check_conformance(model)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert vars(model.cfg) == switches
    assert all(weights.grad is None for weights in model.parameters())
    hooked = [name for name, point in model.hook_dict.items() if point.fwd_hooks or point.bwd_hooks]
    assert hooked == ["hook_embed"]
    fired.clear()
    model(sample_inputs(model)[0])
    assert fired == [3]


class Uncopied(ICLTransformer):
    """Hands the caller's tensor to the hooks."""

    def forward(self, input: Tensor, return_type: str | None = "logits", **kwargs: int) -> Tensor:
        resid = self.hook_embed(self._vectors(input))
        for block in self.blocks:
            resid = block(resid)
        return self.unembed(resid)


class LeavesHooks(ICLTransformer):
    """Takes hooks off at the end, but not after an exception."""

    @contextmanager
    def hooks(self, fwd_hooks=(), bwd_hooks=(), reset_hooks_end=True, clear_contexts=False):
        for direction, hooks in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
            for name, hook in hooks:
                self._enable_hook(name, hook, direction)
        yield self
        self.reset_hooks()


class Silent(ICLTransformer):
    """Takes a hook on any point, on or off."""

    def _require(self, asked: str) -> str:
        return asked


def broken(base: type = ICLTransformer, **attributes: object) -> type[ICLTransformer]:
    """A hooked model, some of whose methods or properties are others."""
    return type("Broken", (base,), attributes)


PlainCache = broken(
    run_with_cache=partialmethod(ICLTransformer.run_with_cache, return_cache_object=False)
)
SilentResult = broken(Silent, set_use_attn_result=lambda self, on: None)
SilentSplit = broken(Silent, set_use_split_qkv_input=lambda self, on: None)
NoMLP = broken(Silent, set_use_zero_mlp=lambda self, on: None)
NoReadOut = broken(tl_parameters=lambda self: dict(self.named_parameters()))
MinusOV = broken(OV=property(lambda self: ICLTransformer.OV.fget(self) * 2.0))
OneBlock = broken(blocks_with=lambda self, submodule: [])
Doubled = broken(
    forward=lambda self, *args, **given: 2 * ICLTransformer.forward(self, *args, **given)
)
"""Adds to the read-out what no part of the model accounts for."""


class Anonymous(ICLTransformer):
    """Knows no numbers in place of prompts."""

    def __getattribute__(self, name: str):
        if name in ("numbered", "to_tokens"):
            raise AttributeError(name)
        return super().__getattribute__(name)


class NormedSplit(ICLTransformer):
    """Its heads' inputs are split behind the norm."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        for block in self.blocks:
            block.attn.forward = partial(_normed_first, block.attn)
        return super().forward(*args, **kwargs)


def _normed_first(attn: Attention, resid: Tensor, norm: nn.Module) -> Tensor:
    return Attention.forward(attn, norm(resid))


class NoLastNorm(ICLTransformer):
    """Its read-out passes the last norm by."""

    def forward(self, input: Tensor, return_type: str | None = "logits", **kwargs: int) -> Tensor:
        super().forward(input, return_type, **kwargs)
        return self.unembed(super().forward(input, stop_at_layer=self.cfg.n_layers))


OF_NORMS = (NormedSplit, NoLastNorm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "name", "reason"),
    [
        (Uncopied, "caller's input untouched", "overwrote the caller's input"),
        (Uncopied, "attribution patching: nodes", "does not require grad"),
        (PlainCache, "caches", "run_with_cache gives a dict"),
        (LeavesHooks, "no hook left after an exception", "a hook is still there"),
        (SilentResult, "ablation of heads", "masked at hook_result and at hook_z: off by"),
        (SilentSplit, "patching: direct paths", "hook_q_input did not fire"),
        (SilentSplit, "attribution patching: edges", "hook_q_input"),
        (Doubled, "decomposition of the residual stream", "decompose_resid: off by"),
        (Doubled, "decomposition into heads, logit_attrs", "heads and remainder: off by"),
        (Doubled, "logit lens", "the last entry of the lens: off by"),
        (Anonymous, "patching: position count", "5 columns for 7 positions"),
        (Anonymous, "patching: attn_head_by_pos_every", "shape [5, 2, 5, 3] instead of"),
        (Anonymous, "head detector", "no attribute 'to_tokens'"),
        (NoMLP, "patching: mlp_out", "blocks.1.hook_mlp_out"),
        (NoMLP, "faithfulness", "hook_mlp_out"),
        (NoReadOut, "SVDInterpreter", "unembed.W_U"),
        (MinusOV, "FactoredMatrix: SVD, composition", "singular values of OV: off by"),
        (OneBlock, "subspace affinity", "No attention layers found"),
        (NormedSplit, "patching: direct paths", "by hand: off by"),
        (NormedSplit, "attribution patching: edges", "edge scores add up to node scores up to"),
        (NoLastNorm, "decomposition of the residual stream", "decompose_resid: off by"),
        (NoLastNorm, "logit lens", "the last entry of the lens: off by"),
    ],
)
def test_a_broken_behaviour_fails_its_check(cls: type[ICLTransformer], name: str, reason: str):
    layered = {"norm": "before", "final_norm": True, "d_mlp": 7} if cls in OF_NORMS else {}
    with pytest.raises(Exception, match=re.escape(reason)):
        CHECKS[name](random_model(cls, **layered))


@pytest.mark.parametrize(
    ("stated", "does", "reason"),
    [
        ({"attend_to_self": False}, {"attend_to_self": True}, "attend to themselves"),
        ({"attend_to_self": True}, {"attend_to_self": False}, "does not read itself"),
        ({"context_only": False}, {"context_only": True}, "attends to later positions"),
        ({"context_only": True}, {"context_only": False, "attend_to_self": True}, "to the query"),
    ],
)
def test_another_mask_than_the_settings_say_fails_its_check(stated: dict, does: dict, reason: str):
    model = random_model(**does)
    inner = copy.copy(model.cfg)
    for block in model.blocks:
        block.attn.cfg = inner
    model.cfg.model = replace(model.cfg.model, **{"attend_to_self": False} | stated)
    with pytest.raises(AssertionError, match=reason):
        CHECKS["strict mask"](model)


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
    monkeypatch.setattr(attention, "attention_pattern", pattern)
    with pytest.raises(AssertionError, match=re.escape(reason)):
        CHECKS[name](random_model())


def test_nan_is_not_close():
    nan = torch.tensor([torch.nan])
    with pytest.raises(AssertionError, match=r"^y: off by nan$"):
        require_close(nan, nan, "y")
    with pytest.raises(AssertionError, match=r"^y: shape \[1\] instead of \[1, 1\]$"):
        require_close(nan, nan[None], "y")


@pytest.mark.slow
def test_a_model_in_training_mode_is_told_so():
    failures = check_conformance(random_model().train()).failures
    assert failures["evaluation mode"].endswith("call model.eval()")
    assert "evaluation mode" in failures["patching: resid_pre"]
    assert "strict mask" not in failures


@pytest.mark.slow
def test_a_model_without_weights_is_told_so():
    model = ICLTransformer(ModelConfig(n_heads=2), d_x=3, d_y=2).eval()
    reason = check_conformance(model).failures["ablation of heads"]
    assert reason == "masking changes nothing: no head writes to the prediction"


def test_a_missing_setting_is_named():
    model = random_model()
    model.cfg = settings(model, without="n_key_value_heads")
    failures = check_conformance(model).failures
    assert failures["settings in cfg"] == "cfg lacks n_key_value_heads"


def settings(model: ICLTransformer, *, without: str):
    names = set(conformance_model.SETTINGS) - {without}
    return type("Settings", (), {name: getattr(model.cfg, name) for name in names})()


@pytest.mark.parametrize("module", [nn.Linear(2, 2).eval(), nn.Identity()], ids=repr)
def test_any_module_gives_failures_and_no_exception(module: nn.Module):
    failures = check_conformance(module).failures
    assert set(failures) >= set(CHECKS) - {"evaluation mode"}
    assert "has no attribute 'cfg'" in failures["caches"]


@pytest.mark.slow
def test_a_bridge_passes_what_it_can():
    from transformer_lens.model_bridge import TransformerBridge, sources  # noqa: F401

    cfg = TransformerBridgeConfig(
        n_layers=2, d_model=5, n_ctx=16, d_head=4, n_heads=3, d_vocab=2, d_vocab_out=2,
        attn_only=True, normalization_type=None, device="cpu",
    )  # fmt: skip
    failures = check_conformance(TransformerBridge.boot_native(cfg).eval()).failures
    assert failures["strict mask"] == "positions of layer 0 attend to themselves"
    assert failures["edits of the scores"] == "an edit of hook_attn_scores has no effect"
    assert "use_attn_result" in failures["ablation of heads"]
    assert "5 columns for 7 positions" in failures["patching: position count"]
    works = ["caches", "hooks", "logit lens", "SVDInterpreter", "subspace affinity"]
    assert not set(works) & set(failures)
    assert len(failures) < 20


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
