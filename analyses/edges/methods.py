"""Which attribution method ranks edges between heads best, on shipped models of several layers.

The truth of a single edge is its own patch. The truth of a set of edges is the model that keeps these edges alone.
Rankings: attribution patching (one gradient), integrated gradients of 5 and 20 steps, zero ablation of the two heads
(the smaller of their rises), the patches themselves, and a random order.
Run: python -m analyses edges/methods (ten minutes; --quick: two models, one set of prompts)"""

import time

import numpy as np
import pandas as pd
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from analyses.lib import Measured
from analyses.lib.measured import ROOT
from mechinterp import ablate, attribute_edges, circuit_faithfulness, load
from mechinterp.analysis.patching.edges import EdgeEffects
from mechinterp.analysis.patching.pairing import clean_and_corrupted
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.icl.prompts import Prompts

MODELS = (
    *("sparse-h4-noise0.1-s0", "pool-linear-m4-s0", "pool-linear-m16-s0"),
    *("d8s2-softmax-block-h8x9-l3-noise0.1-lr0.001-s0", "garg-gpt2", "garg-tiny-s0"),
    *("pool-gpt2-m16-s0", "pool-gpt2-none-s0"),
)
STEPS = {"attribution patching": 1, "integrated gradients, 5": 5, "integrated gradients, 20": 20}
SEEDS, N_PROMPTS = range(4), 32
MATTERS = 0.01
"""An edge matters if its patch changes the metric by more than this share of the largest change."""


METHODS = (*STEPS, "zero ablation", "patches", "random")


def rankings(
    model: Checkpoint, clean: Prompts, corrupted: Prompts, seed: int
) -> tuple[pd.DataFrame, dict[str, float]]:
    """One row per edge: its patch, and the score that each method gives it; and seconds by method."""
    scores, seconds = None, {}
    for method, steps in STEPS.items():
        start = time.process_time()
        found: EdgeEffects = attribute_edges(model, clean, corrupted=corrupted, ig_steps=steps)
        seconds[method] = time.process_time() - start
        frame = found.to_frame().set_index(["from", "to"])
        scores = pd.DataFrame({"patched": frame["patched"]}) if scores is None else scores
        scores[method] = frame["estimate"].abs()
    rise = ablate(model, clean, what="heads").rise
    rises = {f"L{layer}H{head}": value for (layer, head), value in np.ndenumerate(rise)}
    scores = scores.reset_index()
    heads = scores["from"], scores["to"].str.partition(".")[0]
    scores["zero ablation"] = np.minimum(*(each.map(rises) for each in heads))
    scores["patches"] = scores["patched"].abs()
    scores["random"] = np.random.default_rng(seed).random(len(scores))
    return scores, seconds


def rows_of(name: str, seed: int) -> list[dict[str, object]]:
    model = load(ROOT / "checkpoints" / name)
    clean, corrupted = clean_and_corrupted(model, None, None, n_prompts=N_PROMPTS, seed=seed)
    scores, seconds = rankings(model, clean, corrupted, seed)
    truth = scores["patched"].abs()
    matter = truth > MATTERS * truth.max()
    rows = []
    for method in METHODS:
        order = scores.sort_values(method, ascending=False, kind="stable")
        circuit = circuit_faithfulness(model, order, clean, corrupted=corrupted)
        rows.append(
            {"model": name, "seed": seed, "method": method, "edges": len(scores)}
            | {"matter": int(matter.sum()), "spearman": spearmanr(scores[method], truth).statistic}
            | {"auroc": roc_auc_score(matter, scores[method]) if not matter.all() else np.nan}
            | {"cpr": circuit.cpr, "cmd": circuit.cmd, "seconds": seconds.get(method)}
        )
    return rows


def measure(quick: bool) -> Measured:
    models, seeds = (MODELS[:2], SEEDS[:1]) if quick else (MODELS, SEEDS)
    return Measured(pd.DataFrame([row for m in models for s in seeds for row in rows_of(m, s)]))
