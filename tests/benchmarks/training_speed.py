"""Speed of the training step against a plain loop, in one run on one thread: ratios, not times.

    python tests/benchmarks/training_speed.py

The plain loop is what one would write first, as the softmax paper's code does: four nn.Linear layers,
automatic differentiation, torch.optim.Adam, fresh prompts from torch.randn.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from mechinterp.config import override, preset
from mechinterp.training.trainer import Pack

ROUNDS, STEPS = 5, 200


class PlainAttention(nn.Module):
    """Multi-head attention of a query over the context."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads, self.d_model = n_heads, d_model
        self.q, self.k, self.v = (
            nn.Linear(d_model, d_model * n_heads, bias=False) for _ in range(3)
        )
        self.o = nn.Linear(d_model * n_heads, 1, bias=False)

    def forward(self, query: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        def split(z: torch.Tensor) -> torch.Tensor:
            return z.view(*z.shape[:2], self.n_heads, self.d_model).transpose(1, 2)

        q, k, v = split(self.q(query)), split(self.k(context)), split(self.v(context))
        pattern = torch.softmax(q @ k.mT / self.d_model**0.5, dim=-1)
        return self.o((pattern @ v).transpose(1, 2).flatten(2))[:, 0]


def plain_loop(n_heads: int) -> Callable[[int], None]:
    model = PlainAttention(6, n_heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run(steps: int) -> None:
        for _ in range(steps):
            x, beta = torch.randn(256, 41, 5), torch.randn(256, 5, 1) / 5**0.5
            y = x @ beta + 0.1**0.5 * torch.randn(256, 41, 1)
            tokens = torch.cat([x, y], -1)
            query = torch.cat([x[:, -1:], torch.zeros(256, 1, 1)], -1)
            loss = (model(query, tokens[:, :-1]) - y[:, -1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def pack_loop(head_counts: list[int]) -> Callable[[int], None]:
    base = override(preset("softmax-h2"), f"train.log_every={STEPS}", "train.n_eval_prompts=256")
    models = {
        f"{seed}": override(base, f"model.n_heads={n_heads}", f"seed={seed}")
        for seed, n_heads in enumerate(head_counts)
    }
    pack = Pack(models)
    return lambda steps: [pack.advance() for _ in range(steps // STEPS)] and None


def seconds(run: Callable[[int], None]) -> float:
    start = time.perf_counter()
    run(STEPS)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    packs = {
        "1 model of 2 heads": [2],
        "64 models of 2 heads": [2] * 64,
        "the 26 shipped models": [1] * 3 + [2] * 12 + [3] * 4 + [4] * 4 + [8] * 3,
    }
    plain, loops = plain_loop(2), {name: pack_loop(counts) for name, counts in packs.items()}
    for name, loop in loops.items():
        # In turn, so that both see the machine at the same speed.
        times = [(seconds(plain), seconds(loop)) for _ in range(ROUNDS)]
        n_models, n_heads = len(packs[name]), sum(packs[name])
        ratio = statistics.median(n_models * a / b for a, b in times)
        rate = statistics.median(STEPS / b for _, b in times)
        base = statistics.median(STEPS / a for a, _ in times)
        print(
            f"{name}: {ratio:.1f} times the plain loop in model-steps per second "
            f"({rate:.0f} steps/s, {rate * n_heads:.0f} head-steps/s; plain loop {base:.0f} steps/s)"
        )


if __name__ == "__main__":
    main()
