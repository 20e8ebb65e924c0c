"""Attention weights of each head: on a few prompts next to the similarity of token and query, and
their entropy."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp import figures, heatmaps
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import HEAD_COLUMNS, Table
from mechinterp.analysis.stats import mean_and_sem, rank_correlation
from mechinterp.config import TaskLike
from mechinterp.display import Result, counted, head_names, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import prompts_and_law
from mechinterp.models.run.n_prompts import LEAST
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.run.ways import Predictor

ENTROPY_PROMPTS = 512
"""Largest number of prompts that the entropies are means over."""
SUM_ROUNDING = 1e-3
"""Largest deviation of the sum of the weights from 1 that counts as rounding (half precision)."""
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
    x: Float[np.ndarray, "prompt key d_x"]
    """Covariate x of each key; a key that holds a y has the x of its pair."""
    y: Float[np.ndarray, "prompt key d_y"]
    prediction: Float[np.ndarray, "prompt d_y"]
    target: Float[np.ndarray, "prompt d_y"]
    """The query's response without noise."""
    n_prompts: int
    """Number of prompts from which the shown ones were chosen."""
    entropy: Float[np.ndarray, "layer head_of_layer"]
    """Mean over the first `ENTROPY_PROMPTS` distinct prompts of -Σ p log p over the keys, in nats: log of the
    number of keys for equal weights, 0 if one key has all the weight. NaN for weights that are no
    distribution."""
    entropy_sem: Float[np.ndarray, "layer head_of_layer"]
    """Standard error of `entropy` over prompts; NaN for fewer than 8 distinct ones."""
    COLUMNS: ClassVar = HEAD_COLUMNS | {
        "similarity": "Scalar product of the key's x and the query's x. A key that holds a y has the x of its pair.",
        "y": "Response y of each key; a key that holds an x has the y of its pair. 0 for the query.",
        "prompt": "Number of the prompt, from 0.",
        "key": "Number of the token, from 0.",
        "attention": "Attention weight of the query on the token.",
        "entropy": "Mean over prompts of the entropy of the head's weights, -Σ p log p, in nats; NaN for weights that are no distribution.",
        "entropy_sem": "Standard error of entropy over prompts; empty for fewer than 8 distinct ones.",
    }
    UNITS: ClassVar = {"x²": ("similarity",)}

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
        signed = " Weights come from no softmax: they do not sum to 1, and some are negative."
        return [
            f"Attention on {chosen}.{signed if self.pattern.min() < 0 else ''}",
            f"Tokens are sorted by similarity to the query, ⟨x token, x query⟩. Rank correlation with the weight: "
            f"{listed}.",
            *self._entropies_in_words,
        ]

    @property
    def _entropies_in_words(self) -> list[str]:
        """Smallest and largest entropy of a head; empty if the weights are no distribution."""
        flat, sem = self.entropy.ravel(), self.entropy_sem.ravel()
        if np.isnan(flat).any():
            return []
        ends = [
            f"{with_error(flat[at], sem[at])} ({self.head_names[at]})"
            for at in sorted({int(flat.argmin()), int(flat.argmax())})
        ]
        text = " to ".join(ends)
        return [
            f"Entropy of the weights: {text} nats; log of the number of keys for equal weights."
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
        columns |= {name: getattr(self, name)[layer, head] for name in with_sem("entropy")}
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
    the smallest error to the largest. Otherwise all prompts are shown in their own order. Entropies
    are means over at most 512 distinct prompts.

    For a recurrent layer, or a module whose softmax is not found, it is the exact pattern A of the outputs z = A v. It is
    read with values that are 1 at one token and 0 at all others (`exact_attention`).

    Args:
        prompts: Prompts to choose from; None draws `n_prompts` with `seed`.
        task: Law of the prompts that are drawn; None: the model's own.
        n_prompts: None means 4096, or 512 for models with norms or MLPs.
        shown: Largest number of prompts in the result.
    Raises:
        ValueError: If `shown` is below 1, a layer has no hook on its pattern and is not linear in its
            values, or the model has neither one nor two positions per pair.
    Source:
        A choice made here: which prompts are shown.
    See also:
        `circuits`, `attribute_edges`.
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
    return _patterns_on(predictor_of(source), prompts, shown)


def _patterns_on(predictor: Predictor, prompts: Prompts, shown: int) -> AttentionPatterns:
    """Attention on at most `shown` of the prompts, with entropies over all."""
    n_drawn = len(prompts)
    with torch.no_grad():
        prediction = predictor.predict(prompts)
    distinct = prompts.distinct()[:ENTROPY_PROMPTS]
    entropy, entropy_sem = entropies(predictor.query_patterns(distinct).double())
    if n_drawn > shown:
        chosen = _spread((prediction - prompts.y_query_clean).square().mean(1), shown)
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
        entropy=entropy,
        entropy_sem=entropy_sem,
    )


def _spread(error: Float[Tensor, " prompt"], count: int) -> Int[Tensor, " shown"]:
    """Numbers of prompts whose errors are spread evenly over all ranks, from the smallest to the largest."""
    even = torch.linspace(0, len(error) - 1, count, dtype=torch.float64, device="cpu")
    return error.argsort(stable=True).cpu()[even.round().long()]


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


def entropies(
    patterns: Float[Tensor, "layer prompt head key"],
) -> tuple[Float[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]]:
    """Mean entropy of each head's weights over distinct prompts, in nats, and its standard error (NaN for fewer than 8);
    NaN if a weight is negative or they do not sum to 1."""
    least, furthest = patterns.min().item(), (patterns.sum(-1) - 1).abs().max().item()
    if not (least >= 0 and furthest <= SUM_ROUNDING):
        return (np.full((patterns.shape[0], patterns.shape[2]), np.nan),) * 2
    entropy = -torch.xlogy(patterns, patterns).sum(-1)
    by_prompt = entropy.transpose(0, 1).numpy(force=True)
    if len(by_prompt) < LEAST:
        return by_prompt.mean(0), np.full_like(by_prompt[0], np.nan)
    return mean_and_sem(by_prompt)
