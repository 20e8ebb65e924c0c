"""How often an assumed task is doubted: the prompts of the script behind the table in docs/trust.md."""

import pandas as pd
import pytest
import torch

from analyses.algorithms import task_doubt
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import sample_prompts
from tests.conftest import CHECKPOINTS


def test_prompts_are_changed_by_the_factors_and_by_nothing_else():
    task = TaskConfig(d_x=3, d_y=2, context_length=6)
    own = sample_prompts(task, 16, seed=1, dtype=torch.float64)
    same = task_doubt.changed(task, 16, 1)
    for name in ("x", "y", "x_query", "y_query", "y_query_clean", "beta"):
        torch.testing.assert_close(getattr(same, name), getattr(own, name), rtol=0, atol=1e-12)
    found = task_doubt.changed(task, 16, 1, noise_var=4, beta_var=9, covariance=16)
    clean = torch.einsum("blx,bxn->bln", found.x, found.beta)
    own_clean = torch.einsum("blx,bxn->bln", own.x, own.beta)
    torch.testing.assert_close(found.x, 4 * own.x)
    torch.testing.assert_close(clean, 12 * own_clean)
    torch.testing.assert_close(found.y - clean, 2 * (own.y - own_clean))
    noise = found.y_query - found.y_query_clean
    torch.testing.assert_close(noise, 2 * (own.y_query - own.y_query_clean))
    assert task_doubt.changed(task, 16, 1, context_length=0.5).x.shape[1] == 3


@pytest.mark.slow
def test_covariates_of_another_size_are_seen_and_the_own_task_is_not_doubted():
    rows = pd.DataFrame(task_doubt.rows_of(CHECKPOINTS / "linear-h1-s0"))
    doubted = rows.groupby("change")["doubted"].mean()
    assert doubted["own task"] == 0
    assert doubted[[name for name in doubted.index if "covariance" in name]].tolist() == [1, 1]
