"""How often two heads end with one sign, as a kernel smoother split in two, instead of as debiased GD.

    python analyses/stuck_seeds.py          (about five minutes on one core)
    python analyses/stuck_seeds.py --quick  (under a minute, a tenth of the steps)

Trains 64 seeds of the two-head model in one pack, in the softmax paper's setting, and writes
analyses/results/stuck_seeds.csv: after every 2,500 steps, the seeds whose heads have one sign. The paper
(He et al. 2025, arXiv 2503.12734) says that the pattern of opposite signs consistently appears.
"""

import argparse
from pathlib import Path

import pandas as pd
from scipy.stats import binomtest

from mechinterp.config import override, preset
from mechinterp.training.trainer import Pack

OUT = Path(__file__).parent / "results" / "stuck_seeds.csv"
SEEDS, STEPS, EVERY = 64, 30_000, 2_500


def row(pack: Pack) -> dict:
    """The seeds whose two heads have one sign of omega and one of mu, both heads being in use."""
    omega = pack.weights.omega.mean(1).view(-1, 2)
    mu = pack.weights.mu[:, 0].view(-1, 2)
    in_use = mu.abs().min(1).values > 0.05
    stuck = in_use & (omega.prod(1) > 0) & (mu.prod(1) > 0)
    interval = binomtest(int(stuck.sum()), SEEDS).proportion_ci(method="wilson")
    loss = pack.rows["eval_loss"][-1]
    return {
        "step": pack.step,
        "stuck": int(stuck.sum()),
        "fraction": stuck.float().mean().item(),
        "low": interval.low,
        "high": interval.high,
        "loss_stuck": loss[stuck].mean().item(),
        "loss_others": loss[~stuck].mean().item(),
        "seeds": " ".join(str(seed) for seed in stuck.nonzero().flatten().tolist()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    scale = 10 if arguments.quick else 1
    base = override(
        preset("softmax-h2"), f"train.steps={STEPS // scale}", f"train.log_every={EVERY // scale}"
    )
    pack = Pack({str(seed): override(base, f"seed={seed}") for seed in range(SEEDS)})
    rows = []
    while not pack.finished:
        pack.advance()
        rows.append(row(pack))
        print(rows[-1], flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(arguments.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
