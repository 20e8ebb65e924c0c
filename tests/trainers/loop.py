"""What both libraries train: a small module on a fixed set of prompts."""

import torch
from torch import Tensor, nn

from mechinterp import Monitor, TaskConfig
from mechinterp.icl.prompts import draw_prompts

TASK = TaskConfig(d_x=2, context_length=6)
PROMPTS = draw_prompts(TASK, 32, seed=1)


class Model(nn.Module):
    """A Transformer encoder; with labels it returns its loss, as Hugging Face's Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)
            self.read_in = nn.Linear(3, 8)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.read_out = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        prediction = self.read_out(self.encoder(self.read_in(tokens)))[:, -1]
        if labels is None:
            return {"prediction": prediction}
        return {"loss": (prediction - labels).square().mean(), "prediction": prediction}


def monitor(rows: list[dict]) -> Monitor:
    return Monitor(
        task=TASK, read=lambda output: output["prediction"], every=4, n_prompts=32, log=rows.append
    )


def assert_watched(watched: Monitor, rows: list[dict], model: Model) -> None:
    """Steps 0, 4 and 8 of 8, the last of them the trained model."""
    run = watched.run()
    assert run.steps == [row["icl/step"] for row in rows] == [0, 4, 8]
    assert {"icl/loss", "icl/ridge", "icl/L0H1/rise"} <= rows[0].keys()
    assert rows[2]["icl/loss"] != rows[0]["icl/loss"]
    with torch.no_grad():
        last = model.eval()(PROMPTS.tokens)["prediction"]
    torch.testing.assert_close(run.predict(PROMPTS), last)
