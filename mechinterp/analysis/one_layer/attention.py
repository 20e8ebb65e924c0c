"""Attention weights of each head on given prompts, beside the similarity of token and query."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.number_format import digits
from mechinterp.analysis.one_layer.circuits import weights_of
from mechinterp.analysis.result import Table
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import AttentionWeights, attend, head_outputs, predict
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPatterns(Result):
    """Attention of the query on each of a few prompts."""

    pattern: Float[np.ndarray, "prompt head key"]
    """Weights of the keys; where the query is among its keys it is the last."""
    similarity: Float[np.ndarray, "prompt key"]
    """Scalar product of a key's x and the query's, unit x^2."""
    x: Float[np.ndarray, "prompt key d_x"]
    """Covariates of the keys."""
    y: Float[np.ndarray, "prompt key d_y"]
    """Responses of the keys."""
    prediction: Float[np.ndarray, "prompt d_y"]
    target: Float[np.ndarray, "prompt d_y"]
    """The query's response without noise."""
    outputs: Float[np.ndarray, "prompt head d_y"]
    """What each head adds to the prediction; a bias is what is left of it."""
    n_prompts: int
    """Prompts that these were taken from, by how far the prediction is off."""

    def __repr__(self) -> str:
        n_prompts, n_heads, n_keys = self.pattern.shape
        return f"AttentionPatterns({n_prompts} prompts, {n_heads} heads, {n_keys} keys)"

    def sentences(self) -> list[str]:
        """Which prompts these are, and how much of the weights their likeness to the query explains."""
        n_prompts, n_heads, _ = self.pattern.shape
        chosen = f"{n_prompts} prompts"
        if n_prompts < self.n_prompts:
            chosen += (
                f" of {self.n_prompts}, from the one whose prediction is nearest to its target to the one "
                f"that is furthest off; it opens on the typical one"
            )
        told = ", ".join(f"{digits(self._rank(head))} of head {head}" for head in range(n_heads))
        return [
            f"Attention on {chosen}.",
            f"Tokens are sorted by likeness to the query, ⟨x token, x query⟩; its rank correlation with the weights is "
            f"{told}.",
        ]

    def _rank(self, head: int) -> float:
        """Mean over prompts of the rank correlation of weights and likeness."""
        both = (self.pattern[:, head], self.similarity)
        ranks = [pd.DataFrame(values.T).rank().to_numpy() for values in both]
        with np.errstate(invalid="ignore", divide="ignore"):
            each = [np.corrcoef(a, b)[0, 1] for a, b in zip(*(r.T for r in ranks), strict=True)]
        return float(np.mean(each))

    def tables(self) -> dict[str, Table]:
        """Every weight."""
        return {"attention": Table(self.to_frame(), "Weight of every token", brief=False)}

    def figures(self) -> dict[str, go.Figure]:
        """Weights over tokens, and over likeness."""
        return {"attention": self.plot(), "similarity": self.plot_similarity()}

    def to_frame(self) -> pd.DataFrame:
        """One row per prompt, head and key."""
        prompt, head, key = np.indices(self.pattern.shape).reshape(3, -1)
        columns = {"prompt": prompt, "head": head, "key": key, "attention": self.pattern.ravel()}
        columns["similarity"] = self.similarity[prompt, key]
        n_responses = self.y.shape[2]
        for response in range(n_responses):
            name = "y" if n_responses == 1 else f"y_{response}"
            columns[name] = self.y[prompt, key, response]
        return pd.DataFrame(columns)

    def plot(self) -> go.Figure:
        """Attention of each head to each token, the most alike to the query last, with a slider over the prompts."""
        n_prompts, n_heads, n_keys = self.pattern.shape
        figure = figures.heatmap(
            self.pattern[0],
            title="",
            rows=[f"head {head}" for head in range(n_heads)],
            columns=[str(rank) for rank in range(n_keys)],
            unit="weight",
            limit=float(np.abs(self.pattern).max()) or 1.0,
            signed=bool(self.pattern.min() < 0),
        )
        hover = "%{y}, %{text}<br>weight %{z:.4f}<extra></extra>"
        figure.update_traces(hovertemplate=hover)
        figure.update_xaxes(title_text="tokens, the most alike to the query last", type="category")
        frames = {}
        for prompt in range(n_prompts):
            order = self.similarity[prompt].argsort(kind="stable")
            tokens = self._tokens(prompt)
            weights = self.pattern[prompt][:, order].astype(np.float32)
            frames[str(prompt)] = [{"z": weights, "text": [[tokens[i] for i in order]] * n_heads}]
        return figures.with_slider(
            figure, frames, label="prompt", titles=self._titles(), start=self.typical
        )

    def plot_similarity(self) -> go.Figure:
        """Attention against how alike token and query are, with a slider over the prompts."""
        n_prompts, n_heads, _ = self.pattern.shape
        last = {
            f"head {head}": (self.similarity[-1], self.pattern[-1, head]) for head in range(n_heads)
        }
        figure = figures.points(
            last, title="", x_title="⟨x token, x query⟩ (x²)", y_title="attention weight"
        )
        figure.update_traces(
            hovertemplate="weight %{y:.4f}<br>%{text}<extra>%{fullData.name}</extra>"
        )
        frames = {
            str(prompt): [
                {
                    "x": self.similarity[prompt],
                    "y": self.pattern[prompt, head],
                    "text": self._tokens(prompt),
                }
                for head in range(n_heads)
            ]
            for prompt in range(n_prompts)
        }
        titles = [f"Weight against likeness to the query, prompt {name}" for name in frames]
        return figures.with_slider(
            figure, frames, label="prompt", titles=titles, start=self.typical
        )

    @property
    def typical(self) -> int:
        """The prompt in the middle by how far the prediction is off."""
        off = np.square(self.prediction - self.target).mean(1)
        return int(off.argsort(kind="stable")[len(off) // 2])

    def _tokens(self, prompt: int) -> list[str]:
        """What the tokens of a prompt are, and how like the query."""
        rows = zip(self.x[prompt], self.y[prompt], self.similarity[prompt], strict=True)
        return [
            f"token {key}<br>x {_told(x, 2)}<br>y {_told(y)}<br>similarity {s:.3f}"
            for key, (x, y, s) in enumerate(rows)
        ]

    def _titles(self) -> list[str]:
        return [
            f"Prompt {prompt}: ŷ {_told(self.prediction[prompt])}, x·β {_told(self.target[prompt])}"
            for prompt in range(len(self.pattern))
        ]


def _told(numbers: np.ndarray, digits: int = 3) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def attention_patterns(
    source: Source,
    prompts: Prompts | None = None,
    *,
    shown: int = 5,
    n_prompts: int | None = None,
    seed: int = 0,
) -> AttentionPatterns:
    """The attention of a one-layer model's heads on a few prompts, from the one it does best on to the one it does worst on.

    Weights are those the query gives to the tokens of its context. Of more prompts than are shown those at even
    quantiles of (ŷ − x·β)² are taken; prompts that are no more than that stay in their order.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        shown: Most prompts whose attention is kept.
        n_prompts: None: 4096.
    Raises:
        ValueError: If the model is not one layer of attention, or `shown` is below 1.
    Example:
        >>> from mechinterp import load
        >>> attention_patterns(load("checkpoints/softmax-h2-s0"), n_prompts=64)
        AttentionPatterns(5 prompts, 2 heads, 40 keys)
    """
    if shown < 1:
        raise ValueError(f"shown must be >= 1, got {shown}.")
    weights = weights_of(source, "attention_patterns")
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    n_drawn, prompts = (
        len(prompts),
        _spread_out(weights, prompts.to("cpu").to(torch.float64), shown),
    )
    keys = prompts.tokens if weights.attend_to_self else prompts.context_tokens
    pattern, _, _ = attend(weights, keys, prompts.x_query)
    d_x = weights.d_x
    similarity = torch.einsum("bkx,bx->bk", keys[:, :, :d_x], prompts.x_query)
    return AttentionPatterns(
        pattern=pattern.mT.numpy(force=True),
        similarity=similarity.numpy(force=True),
        x=keys[:, :, :d_x].numpy(force=True),
        y=keys[:, :, d_x:].numpy(force=True),
        prediction=predict(weights, prompts).numpy(force=True),
        target=prompts.y_query_clean.numpy(force=True),
        outputs=head_outputs(weights, prompts).numpy(force=True),
        n_prompts=n_drawn,
    )


def _spread_out(weights: AttentionWeights, prompts: Prompts, shown: int) -> Prompts:
    """At most so many of the prompts, from the one with the least error on."""
    if len(prompts) <= shown:
        return prompts
    error = (predict(weights, prompts) - prompts.y_query_clean).square().mean(1)
    places = torch.linspace(0, len(prompts) - 1, shown, dtype=torch.float64).round().long()
    return prompts[error.argsort(stable=True)[places]]
