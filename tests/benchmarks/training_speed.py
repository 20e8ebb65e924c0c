"""Speed of training against a plain loop, in one run on one thread: ratios, not times.

    python tests/benchmarks/training_speed.py

Packs are trained by the compiled kernel and by the tensor operations it is tested against.

The plain loop is what one would write first, as the softmax paper's code does: four nn.Linear layers,
automatic differentiation, torch.optim.Adam, fresh prompts from torch.randn.
"""

import time
from collections.abc import Callable

import torch
from torch import nn

from mechinterp.config import override, preset
from mechinterp.training import trainer
from mechinterp.training.step import by_tensors, loss_and_gradients
from mechinterp.training.trainer import Pack

ROUNDS, STEPS = 7, 100


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


def pack_loop(head_counts: list[int], step: Callable) -> Callable[[int], None]:
    base = override(preset("softmax-h2"), f"train.log_every={STEPS}", "train.n_eval_prompts=256")
    models = {
        f"{seed}": override(base, f"model.n_heads={n_heads}", f"seed={seed}")
        for seed, n_heads in enumerate(head_counts)
    }
    pack = Pack(models)

    def run(steps: int) -> None:
        trainer.loss_and_gradients = step
        for _ in range(steps // STEPS):
            pack.advance()

    return run


def seconds(run: Callable[[int], None]) -> float:
    start = time.perf_counter()
    run(STEPS)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    packs = {
        "1 model of 2 heads": [2],
        "1 model of 8 heads": [8],
        "16 models of 2 heads": [2] * 16,
        "64 models of 2 heads": [2] * 64,
        "26 shipped models": [1] * 3 + [2] * 12 + [3] * 4 + [4] * 4 + [8] * 3,
    }
    print("model-steps per second, against the plain loop with as many heads (2 for the last)")
    for name, counts in packs.items():
        plain = plain_loop(counts[0] if len(set(counts)) == 1 else 2)
        loops = [plain, pack_loop(counts, by_tensors), pack_loop(counts, loss_and_gradients)]
        for loop in loops:
            seconds(loop)
        # In turn, so that all see the machine at the same speed; the least time is the least disturbed.
        rounds = [[seconds(loop) for loop in loops] for _ in range(ROUNDS)]
        base, tensors, kernel = (min(times) for times in zip(*rounds, strict=True))
        ratios = [len(counts) * base / own for own in (tensors, kernel)]
        rates = ", ".join(f"{STEPS / own:.0f}" for own in (base, tensors, kernel))
        print(
            f"{name}: tensor operations {ratios[0]:.1f} times, kernel {ratios[1]:.1f} times "
            f"({rates} steps/s)"
        )


if __name__ == "__main__":
    main()
