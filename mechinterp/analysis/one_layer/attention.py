"""Attention weights of each head on given prompts, beside the similarity of token and query."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.one_layer.circuits import weights_of
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import attend, predict
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

    def __repr__(self) -> str:
        n_prompts, n_heads, n_keys = self.pattern.shape
        return f"AttentionPatterns({n_prompts} prompts, {n_heads} heads, {n_keys} keys)"

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
        """Attention of each head to each token, with a slider over the prompts."""
        n_prompts, n_heads, n_keys = self.pattern.shape
        figure = figures.heatmap(
            self.pattern[-1],
            title="",
            rows=[f"head {head}" for head in range(n_heads)],
            columns=[str(key) for key in range(n_keys)],
            unit="weight",
            limit=float(np.abs(self.pattern).max()) or 1.0,
            signed=bool(self.pattern.min() < 0),
        )
        hover = "%{y}, token %{x}<br>weight %{z:.4f}<br>%{text}<extra></extra>"
        figure.update_traces(hovertemplate=hover)
        figure.update_xaxes(title_text="token of the prompt", type="category")
        frames = {
            str(prompt): [
                {
                    "z": self.pattern[prompt].astype(np.float32),
                    "text": [self._tokens(prompt)] * n_heads,
                }
            ]
            for prompt in range(n_prompts)
        }
        return figures.with_slider(figure, frames, label="prompt", titles=self._titles())

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
        return figures.with_slider(figure, frames, label="prompt", titles=titles)

    def _tokens(self, prompt: int) -> list[str]:
        """What the tokens of a prompt are, and how like the query."""
        rows = zip(self.x[prompt], self.y[prompt], self.similarity[prompt], strict=True)
        return [f"x {_told(x, 2)}<br>y {_told(y)}<br>similarity {s:.3f}" for x, y, s in rows]

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
    n_prompts: int = 3,
    seed: int = 0,
) -> AttentionPatterns:
    """The attention of a one-layer model's heads on a few prompts.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> prompts = sample_prompts(checkpoint.config.task, 3, generator=generator_for(0, "eval", 0))
        >>> attention_patterns(checkpoint, prompts)
        AttentionPatterns(3 prompts, 2 heads, 40 keys)
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    weights, prompts = weights_of(source, "attention_patterns"), prompts.to("cpu").to(torch.float64)
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
    )
