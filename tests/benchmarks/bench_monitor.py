"""A monitor's measurement, against the training steps between two of them: its share of a run is one over the ratio."""

import torch
from torch import nn

from mechinterp import Monitor, TaskConfig, sample_prompts

TASK, EVERY, TIMED = TaskConfig(), 1000, 20


def test_a_measurement_of_two_layers(versus):
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
    module = nn.Sequential(nn.Linear(6, 32), *layers, nn.Linear(32, 1))
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)

    def steps() -> None:
        for step in range(TIMED):
            prompts = sample_prompts(TASK, 64, seed=step)
            loss = (module(prompts.tokens)[:, -1] - prompts.y_query).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def measurement() -> None:
        Monitor(task=TASK, read=lambda output: output[:, -1])(0, module)

    versus(
        f"a monitor's measurement of 2 layers of 4 heads, against the {EVERY:,} plain training steps between two "
        f"(plain: {TIMED})",
        measurement,
        steps,
        work=EVERY / TIMED,
        rounds=3,
    )
