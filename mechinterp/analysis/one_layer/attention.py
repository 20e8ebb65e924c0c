"""Attention weights of each head: on a few prompts next to the similarity of token and query, and
their entropy."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures, heatmaps
from mechinterp.analysis.number_format import cell, digits, with_error
from mechinterp.analysis.random_models import random_models
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import estimates, mean_and_sem, rank_correlation
from mechinterp.config import TaskLike
from mechinterp.display import Result, counted, frame_of, head_axes, head_names, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, prompts_and_law
from mechinterp.models.run.predictor import Predictor, Source, predictor_of

MOST_NAMED = 4
"""Largest number of heads that a sentence names one by one; of more heads it names the strongest
only."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPatterns(Result):
    """Attention weights of the query on a few prompts, for all heads of all layers."""

    pattern: Float[np.ndarray, "prompt head key"]
    """Attention weight of each key, heads layer by layer; the query is the last key if it attends
    to itself."""
    n_layers: int
    similarity: Float[np.ndarray, "prompt key"]
    """Scalar product of the key's x and the query's x, unit x^2. A key that holds a y has the x of
    its pair."""
    x: Float[np.ndarray, "prompt key d_x"]
    """Covariate x of each key; a key that holds a y has the x of its pair."""
    y: Float[np.ndarray, "prompt key d_y"]
    """Response y of each key; a key that holds an x has the y of its pair. 0 for the query."""
    prediction: Float[np.ndarray, "prompt d_y"]
    target: Float[np.ndarray, "prompt d_y"]
    """The query's response without noise."""
    n_prompts: int
    """Number of prompts from which the shown ones were chosen."""

    @property
    def head_names(self) -> list[str]:
        """Names "head 0", ... for one layer, "L0H0", ... for several."""
        n_heads = self.pattern.shape[1]
        if self.n_layers == 1:
            return [f"head {head}" for head in range(n_heads)]
        return head_names((self.n_layers, n_heads // self.n_layers))

    def __repr__(self) -> str:
        n_prompts, n_heads, n_keys = self.pattern.shape
        layers = "" if self.n_layers == 1 else f"{counted(self.n_layers, 'layer')}, "
        return f"AttentionPatterns({n_prompts} prompts, {layers}{n_heads} heads, {n_keys} keys)"

    def sentences(self) -> list[str]:
        """The choice of prompts, and how well the similarity to the query explains the attention
        weights."""
        n_prompts, n_heads, _ = self.pattern.shape
        chosen = f"{n_prompts} prompts"
        if n_prompts < self.n_prompts:
            chosen += (
                f" of {self.n_prompts}, from the smallest error of the prediction to the largest; "
                f"the picture opens on the median"
            )
        # Mean over prompts of the rank correlation; a head whose weights are all equal has no ranks.
        pairs = [
            zip(weights, self.similarity, strict=True) for weights in self.pattern.swapaxes(0, 1)
        ]
        ranks = [np.mean([rank_correlation(*pair) for pair in each]) for each in pairs]
        of_each = [
            f"{name} {'not defined' if np.isnan(rank) else digits(rank)}"
            for name, rank in zip(self.head_names, ranks, strict=True)
        ]
        listed = ", ".join(of_each)
        if n_heads > MOST_NAMED:
            best = int(np.nan_to_num(np.abs(ranks)).argmax())
            listed = f"{of_each[best]}, the strongest of {n_heads} heads"
        signed = (
            " Weights are products without a softmax: they do not sum to 1, and some are negative."
        )
        return [
            f"Attention on {chosen}.{signed if self.pattern.min() < 0 else ''}",
            f"Tokens are sorted by similarity to the query, ⟨x token, x query⟩. Rank correlation with the weight: "
            f"{listed}.",
        ]

    def tables(self) -> dict[str, Table]:
        """Table of all weights."""
        return {"attention": Table(self.to_frame(), "Weight of every token", brief=False)}

    def figures(self) -> dict[str, go.Figure]:
        """Weights by token, and weights against similarity."""
        return {"attention": self.plot(), "similarity": self.plot_similarity()}

    def to_frame(self) -> pd.DataFrame:
        """One row per prompt, head and key."""
        prompt, head, key = np.indices(self.pattern.shape).reshape(3, -1)
        layer, head = np.divmod(head, self.pattern.shape[1] // self.n_layers)
        columns = {"prompt": prompt, "layer": layer, "head": head, "key": key}
        columns |= {"attention": self.pattern.ravel(), "similarity": self.similarity[prompt, key]}
        names = ["y"] if self.y.shape[2] == 1 else [f"y_{n}" for n in range(self.y.shape[2])]
        columns |= dict(zip(names, self.y[prompt, key].T, strict=True))
        return pd.DataFrame(columns)

    def plot(self) -> go.Figure:
        """Attention of each head to each token, sorted by similarity to the query, with a slider
        over the prompts."""
        _, n_heads, n_keys = self.pattern.shape
        figure = heatmaps.heatmap(
            self.pattern[0],
            title="",
            rows=self.head_names,
            columns=[str(rank) for rank in range(n_keys)],
            unit="weight",
            limit=float(np.abs(self.pattern).max()) or 1.0,
            signed=bool(self.pattern.min() < 0),
        )
        hover = "%{y}, %{text}<br>weight %{z:.4f}<extra></extra>"
        figure.update_traces(hovertemplate=hover)
        figure.update_xaxes(title_text="tokens, sorted by similarity to the query", type="category")
        frames, titles = {}, []
        for prompt, weights in enumerate(self.pattern):
            order = self.similarity[prompt].argsort(kind="stable")
            tokens = self._tokens(prompt)
            texts = [[tokens[i] for i in order]] * n_heads
            frames[str(prompt)] = [{"z": weights[:, order].astype(np.float32), "text": texts}]
            predicted, target = _joined(self.prediction[prompt]), _joined(self.target[prompt])
            titles.append(f"Prompt {prompt}: ŷ {predicted}, x·β {target}")
        return figures.with_slider(
            figure, frames, label="prompt", titles=titles, start=self.typical
        )

    def plot_similarity(self) -> go.Figure:
        """Attention weight against similarity of token and query, with a slider over the prompts."""
        figure = figures.runs(
            {name: {name: (np.zeros(0), np.zeros(0))} for name in self.head_names},
            title="",
            x_title="⟨x token, x query⟩ (x²)",
            y_title="attention weight",
            markers=True,
        )
        figure.update_traces(
            hovertemplate="weight %{y:.4f}<br>%{text}<extra>%{fullData.name}</extra>"
        )
        frames = {}
        for prompt, weights in enumerate(self.pattern):
            similarity, tokens = self.similarity[prompt], self._tokens(prompt)
            frames[str(prompt)] = [{"x": similarity, "y": each, "text": tokens} for each in weights]
        titles = [f"Weight against similarity to the query, prompt {name}" for name in frames]
        return figures.with_slider(
            figure, frames, label="prompt", titles=titles, start=self.typical
        )

    @property
    def typical(self) -> int:
        """Index of the prompt with the median squared error."""
        off = np.square(self.prediction - self.target).mean(1)
        return int(off.argsort(kind="stable")[len(off) // 2])

    def _tokens(self, prompt: int) -> list[str]:
        """Hover text of each token: x, y and similarity to the query."""
        rows = zip(self.x[prompt], self.y[prompt], self.similarity[prompt], strict=True)
        return [
            f"token {key}<br>x {_joined(x, 2)}<br>y {_joined(y)}<br>similarity {s:.3f}"
            for key, (x, y, s) in enumerate(rows)
        ]


def _joined(numbers: np.ndarray, digits: int = 3) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def attention_patterns(
    source: Source,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    shown: int = 5,
) -> AttentionPatterns:
    """Attention of every head of every layer on a few prompts, from the query.

    If there are more than `shown` prompts, those at even quantiles of (ŷ − x·β)² are shown, from
    the smallest error to the largest. Otherwise all prompts are shown in their own order.

    Args:
        prompts: Prompts to choose from; None draws `n_prompts` with `seed`.
        task: Law of the prompts that are drawn; None: the model's own.
        n_prompts: None means 4096, or 512 for models with norms or MLPs.
        shown: Largest number of prompts in the result.
    Raises:
        ValueError: If `shown` is below 1, the model has no hooks on its patterns, or it has neither
            one nor two positions per pair.
    Source:
        A choice made here: which prompts are shown.
    See also:
        `attention_entropy`, `circuits`.
    Example:
        >>> from mechinterp import load
        >>> attention_patterns(load("checkpoints/softmax-h2-s0"), n_prompts=64)
        AttentionPatterns(5 prompts, 2 heads, 40 keys)
        >>> attention_patterns(load("checkpoints/sparse-h4-noise0.1-s0"), n_prompts=64)
        AttentionPatterns(5 prompts, 4 layers, 16 heads, 40 keys)
    """
    if shown < 1:
        raise ValueError(f"shown must be >= 1, got {shown}.")
    prompts, _ = prompts_and_law(
        source,
        prompts,
        analysis="attention_patterns",
        task=task,
        n_prompts=n_prompts,
        seed=seed,
        repeated=True,
    )
    predictor = predictor_of(source)
    n_drawn = len(prompts)
    with torch.no_grad():
        prediction = predictor.predict(prompts)
    if n_drawn > shown:
        error = (prediction - prompts.y_query_clean).square().mean(1)
        even = torch.linspace(0, n_drawn - 1, shown, dtype=torch.float64, device="cpu")
        chosen = error.argsort(stable=True).cpu()[even.round().long()]
        prompts, prediction = prompts[chosen], prediction[chosen]
    patterns = predictor.query_patterns(prompts).double()
    if not patterns[..., -1].any():
        patterns = patterns[..., :-1]  # the query is not among its keys
    tokens = _pairs_of_keys(prompts, patterns.shape[-1]).double()
    x, y = tokens.split([prompts.x.shape[2], prompts.y.shape[2]], dim=2)
    return AttentionPatterns(
        pattern=patterns.transpose(0, 1).flatten(1, 2).numpy(force=True),
        n_layers=predictor.n_layers,
        similarity=torch.einsum("bkx,bx->bk", x, prompts.x_query.double()).numpy(force=True),
        x=x.numpy(force=True),
        y=y.numpy(force=True),
        prediction=prediction.double().numpy(force=True),
        target=prompts.y_query_clean.double().numpy(force=True),
        n_prompts=n_drawn,
    )


def _pairs_of_keys(prompts: Prompts, n_keys: int) -> Float[torch.Tensor, "prompt key d_token"]:
    """Pair (x, y) that each key belongs to; keys are pairs, or x and y in turn. The query is last.

    Raises:
        ValueError: If the number of keys fits neither layout.
    """
    length = prompts.x.shape[1]
    if n_keys in (length, length + 1):
        return prompts.tokens[:, :n_keys]
    if n_keys in (2 * length, 2 * length + 1):
        return prompts.tokens.repeat_interleave(2, dim=1)[:, :n_keys]
    raise ValueError(
        f"attention_patterns needs one or two positions for each of {length} pairs, got {n_keys}."
    )


RANDOM_MODELS, RANDOM_PROMPTS = 8, 64
ROUNDING = 1e-3
"""Largest deviation of the sum of the weights from 1 that counts as rounding (half precision)."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionEntropy(Result):
    """Entropy of the query's attention, by head."""

    entropy: Float[np.ndarray, "layer head"]
    """Mean over prompts of -sum_l p_l log p_l, in nats."""
    entropy_sem: Float[np.ndarray, "layer head"]
    """Standard error of `entropy` over prompts."""
    uniform_entropy: Float[np.ndarray, " layer"]
    """log of the number of keys, the entropy of uniform attention, in nats."""
    random_entropy: Float[np.ndarray, " layer"]
    """Entropy of the same layer with random weights: mean over heads and `RANDOM_MODELS` models, in
    nats. NaN if the architecture is unknown."""
    random_entropy_sd: Float[np.ndarray, " layer"]
    """Standard deviation of `random_entropy` over heads and models."""

    def __repr__(self) -> str:
        heads = []
        for which in (self.entropy.argmin(), self.entropy.argmax()):
            at = np.unravel_index(int(which), self.entropy.shape)
            heads.append(
                f"L{at[0]}H{at[1]} {with_error(self.entropy[at], self.entropy_sem[at])} nats (uniform attention "
                f"{digits(self.uniform_entropy[at[0]])}, random weights {cell(self.random_entropy[at[0]])})"
            )
        return f"AttentionEntropy(smallest {heads[0]}; largest {heads[1]})"

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        beside = ("uniform_entropy", "random_entropy", "random_entropy_sd")
        return frame_of(self, *with_sem("entropy"), *beside, **head_axes(self.entropy))

    def plot(self) -> go.Figure:
        """Entropy of every head next to that of random weights; the dotted line is uniform
        attention."""
        frame = self.to_frame()
        columns = {"model": ["entropy", "entropy_sem"]}
        if np.isfinite(self.random_entropy).all():
            columns["random weights"] = ["random_entropy", "random_entropy_sd"]
        figure = figures.bars(
            head_names(self.entropy.shape),
            {name: tuple(frame[both].to_numpy().T) for name, both in columns.items()},
            title="Entropy of the query's attention; dotted: uniform attention",
            y_title="entropy (nats)",
        )
        for level in np.unique(self.uniform_entropy):
            figure.add_hline(float(level), line_dash="dot", line_width=1)
        return figure


def attention_entropy(
    source: Source, prompts: Prompts | None = None, *, n_prompts: int | None = None, seed: int = 0
) -> AttentionEntropy:
    """Entropy of each head's attention from the query, next to uniform attention and random initial
    weights.

    H = -sum_l p_l log p_l. It is log L for uniform attention over L keys, and 0 if one key has all
    the weight.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs.
    Raises:
        ValueError: If the weights are negative or do not sum to 1 (linear attention), or the model
            has no hooks on its patterns.
    Source:
        Shannon's entropy; the comparison with random weights is a choice made here.
    See also:
        `attention_patterns`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import kernel_head
        >>> attention_entropy(kernel_head(omega=0.0, mu=1.0, d_x=5), n_prompts=8)
        AttentionEntropy(smallest L0H0 3.688879 nats (uniform attention 3.69, random weights 3.65); largest L0H0 3.688879 nats (uniform attention 3.69, random weights 3.65))
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    predictor = predictor_of(source)
    patterns = predictor.query_patterns(prompts).double()
    least, furthest = patterns.min().item(), (patterns.sum(-1) - 1).abs().max().item()
    if not (least >= 0 and furthest <= ROUNDING):
        got = f"a weight of {least:.3g}" if least < 0 else f"a sum 1 ± {furthest:.3g}"
        raise ValueError(
            f"attention_entropy needs attention weights >= 0 that add up to 1, got {got}."
        )
    entropy = mean_and_sem(_entropy(patterns).transpose(0, 1).numpy(force=True))
    n_keys = patterns.any(2).any(1).sum(1)
    random = _at_random(predictor, prompts[:RANDOM_PROMPTS])
    return AttentionEntropy(
        **estimates(entropy=entropy),
        uniform_entropy=n_keys.double().log().numpy(force=True),
        random_entropy=random.mean((0, 2)),
        random_entropy_sd=random.std((0, 2), ddof=1),
    )


def _entropy(
    patterns: Float[Tensor, "layer prompt head key"],
) -> Float[Tensor, "layer prompt head"]:
    return -torch.xlogy(patterns, patterns).sum(-1)


def _at_random(predictor: Predictor, prompts: Prompts) -> Float[np.ndarray, "model layer head"]:
    """Mean entropies of models of the same shape with random initial weights; NaN if the shape is
    unknown."""
    if predictor.weights is None:
        return np.full((2, predictor.n_layers, predictor.n_heads), np.nan)
    drawn = prompts.to("cpu").to(torch.float32)
    models = random_models(predictor.weights, RANDOM_MODELS)
    patterns = [predictor_of(model).query_patterns(drawn) for model in models]
    return torch.stack([_entropy(each).mean(1) for each in patterns]).double().numpy(force=True)
