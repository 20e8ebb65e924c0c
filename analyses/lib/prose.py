"""Numbers in the prose of README.md, analyses/README.md and docs/: the phrases that must stand there, made
from the results.

A fast test looks for each phrase, so that a digit changed in a page or in a result is seen.
"""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from analyses.lib import speeds
from analyses.lib.records import Record, all_records
from analyses.lib.result_tables import span
from analyses.sparse.settings_table import pattern, screened, several, table_of

PERCENT = 100


class Results:
    """The records and CSV files of a folder of results."""

    def __init__(self, results: Path) -> None:
        self.folder = results
        self.records = {record.id: record for _, record in all_records(results)}

    def __getitem__(self, id: str) -> Record:
        return self.records[id]

    def table(self, name: str) -> pd.DataFrame:
        return pd.read_csv(self.folder / f"{name}.csv")


def told(record: Record, name: str, digits: tuple[int, int]) -> str:
    """A value and its standard error, each with its digits."""
    return f"{record.values[name]:.{digits[0]}f} ± {record.errors[name]:.{digits[1]}f}"


def some(values: Iterable[float], digits: int) -> str:
    return span(pd.Series(list(values)), digits)


def calibration(found: Results) -> list[str]:
    errors = found.table("calibration_errors")
    models, right, wrong, missed, must = (
        int(errors[name].sum()) for name in ("models", "right", "wrong", "missed", "must")
    )
    return [
        f"of {right + wrong} of {models:,} models that got a pattern's name, {wrong} got a wrong",
        f"of {must} that had to be seen through, {missed} were left `undetermined`",
    ]


def misses(found: Results) -> list[str]:
    errors = found.table("calibration_errors")
    sums = {
        source: errors[errors.source.str.startswith(source)][["must", "missed"]].sum()
        for source in ("", "fault: mismatched head", "built + noise")
    }
    every, mismatched, noise = sums.values()
    return [
        f"{every.missed} of the {every.must} that must be seen through: {mismatched.missed} of "
        f"the {mismatched.must} with a mismatched head",
        f"{noise.missed} of the {noise.must} with up to 10% of noise",
    ]


def foretold(found: Results) -> list[str]:
    one = found.table("softmax_emergence_prediction").set_index("number").value
    counts = {name: int(one[name]) for name in one.index if name.endswith(("seeds", "stuck"))}
    return [
        f"{counts['same_stuck']} of {counts['same_seeds']}",
        f"{counts['opposite_stuck']} of {counts['opposite_seeds']} of the others",
    ]


def one_sign(found: Results) -> list[str]:
    pairs = found.table("softmax_one_sign").sort_values("size_ratio")
    cosine = found["softmax-one-sign-opposite"].values.values()
    loss = found["softmax-one-sign-loss"]
    sizes = [f"{value:.1f}" for value in pairs.size_ratio]
    left = [f"{PERCENT * end:.0f}" for end in (pairs.left.min(), pairs.left.max())]
    mean, error = pairs.gap.mean(), max(loss.errors.values())
    return [
        f"(cosine of A_1 and A_2 {some(cosine, 3).replace('-', '−')})",
        f"by factors of {sizes[0]}, {sizes[1]} and {sizes[2]}",
        f"cancels but for {left[0]} to {left[1]}%",
        f"Its loss is {-mean:.4f} ± {error:.4f} below that of a single head",
    ]


def classified(found: Results) -> list[str]:
    """What `classify` prints of a file of the softmax paper's code."""
    one = found.table("softmax_shipped_models").set_index("model").loc["softmax-h2-s0"]
    return [f"ŷ = {one.eta:.3f} (1/L) Σ_l y_l (x_l − x̄)·x"]


def tasks(found: Results) -> list[str]:
    table = found.table("softmax_heads_needed").query("convention == 'shared-tasks'")
    risks = [f"{one.risk.iloc[0]:.4f}" for _, one in table.groupby("n_heads")][:3]
    gaps = PERCENT * table.gap / table.risk
    usual, stuck = gaps[gaps < 10], gaps[gaps >= 10]
    return [
        f"{', '.join(risks)} exactly for two, three, four heads",
        f"the models {span(usual, 1)}% above that on the same prompts",
        f"(one seed of two heads is stuck {stuck.iloc[0]:.0f}% above)",
    ]


def sparse(found: Results) -> list[str]:
    tuned, single = (
        found["sparse-fine-tuning-pruned"].values,
        found["sparse-C13-fine-tuning"].values,
    )
    full = found["sparse-fine-tuning-full"].values.values()
    by_heads = {
        heads: [PERCENT * (value - 1) for name, value in tuned.items() if f"-h{heads}-" in name]
        for heads in (4, 8)
    }
    return [
        f"they lose {some(by_heads[4], 0)}% where heads are as wide as x",
        f"and {some(by_heads[8], 0)}% where they are half as wide",
        f"({some(single.values(), 2)} of its risk)",
        f"gain nothing from that training ({some(full, 2)})",
    ]


def settings(found: Results) -> list[str]:
    table = several(table_of(found.folder))
    return [
        f"the pattern as a whole (C10, C11 and C12) in {len(pattern(table))} of {len(table)} models",
    ]


def centre(found: Results) -> pd.DataFrame:
    """The models of several heads at d_x 8 and 2 entries that differ in heads and scores alone."""
    table = several(table_of(found.folder))
    plain = "noise_var == .1 and nonzeros == 'signs' and not mlp"
    return table.query(f"d_x == 8 and sparsity == 2 and n_layers == 3 and {plain}")


def widths(found: Results) -> list[str]:
    """What the width of a head decides, over all seeds."""
    table = centre(found)
    paired = table[(table.steps == table.steps.min()) & (table.score == "linear/L")]
    narrow = paired[paired.d_head < paired.d_x]
    wide = paired[(paired.d_head == narrow.d_x.iloc[0] + 1) & (paired.n_heads == 8)]
    same = len(narrow) == len(wide) and set(narrow.seed) == set(wide.seed)
    return [
        f"{len(narrow)} {'paired' if same else 'unpaired'} seeds",
        f"{some(narrow.n_eff_1_median, 1)} of {narrow.n_heads.iloc[0]} heads at work",
        f"with heads of width 9 {some(wide.n_eff_1_median, 2)}",
        f"one of them alone costs {some(narrow.first_refit, 1)} times the risk with a new read-out, against {some(wide.first_refit, 2)}",
        f"as it is {some(narrow.first_median, 0)} times by medians",
        f"{some(narrow.later_refit, 1)} times the risk against {some(wide.later_refit, 1)}",
    ]


def scores(found: Results) -> list[str]:
    """What the scores decide, one seed."""
    table = screened(centre(found))
    linear = table[table.score == "linear/L"]
    wide = linear[linear.d_head > linear.d_x]
    relu, softmax = (table[table.score == score].iloc[0] for score in ("relu/L", "softmax"))
    return [
        f"{some(wide.later_refit, 2)} times the risk with linear scores and heads that wide",
        f"{relu.later_refit:.1f} with relu and {softmax.later_refit:.1f} with softmax",
        f"({relu.to_single_2d:.2f} of a single head's risk with relu, {softmax.to_single_2d:.2f} with softmax)",
        f"({some(linear.to_single_2d, 2)} with linear scores)",
        f"at d_x 8 with two entries at most {table['r2_R x'].max():.2f} of it can be read",
    ]


def small(found: Results) -> list[str]:
    """What models of d_x 4 do, one seed."""
    table = screened(table_of(found.folder)).set_index("model")
    one, two, single, deep, same = (
        table.loc[f"{name}-noise0.1-s0"]
        for name in (
            *("d4s1-linear-h4x5-l3", "d4s1-linear-h2x5-l3", "d4s1-linear-h1x20-l3"),
            *("d4s1-linear-h4x5-l4", "d8s1-linear-h8x9-l3"),
        )
    )
    return [
        f"a single head as wide as four has {single.to_ridge:.2f} of ridge's risk, two have "
        f"{two.to_ridge:.2f}, four {one.to_ridge:.2f}",
        f"with a fourth layer {deep.to_ridge:.2f} ± {deep.to_ridge_sem:.2f}",
        f"({one.to_single_2d:.2f} of a single head's risk at d_x 4 with one entry)",
        f"(R² {one['r2_R x']:.2f})",
        f"risk is {one.to_ridge:.2f} ± {one.to_ridge_sem:.2f} of ridge's",
        f"one head of layer 1 alone costs {one.first_refit:.1f} times the risk with a new read-out, one per later layer {one.later_refit:.1f} times",
        f"{same['r2_R x']:.2f} of it at d_x 8 with one entry",
    ]


def blocks(found: Results) -> list[str]:
    """What norm and MLP change, at the learning rate of attention alone and at their own, with that in all seeds."""
    table = several(table_of(found.folder)).query("mlp and d_x == 8")
    rates = sorted(table.learning_rate.unique())
    own, other = (table[table.learning_rate == rate] for rate in rates)
    longer = own.dropna(subset=["to_fewer_steps"])
    own = own[own.steps == table.steps.min()]
    (softmax,) = other[other.score == "softmax"].itertuples()
    seeds = own.groupby("score").seed.nunique()
    return [
        f"({rates[1]:g}) they end at {some(other.to_ridge, 1)} times ridge's risk",
        f"with softmax {softmax.later_refit:.2f} for one head in each later layer and {softmax.first_refit:.2f} for one in the first",
        f"At their own ({rates[0]:g}, {seeds.min()} seeds of each score) it is {some(own.to_ridge, 2)} times",
        f"{some(own.to_single_2d, 2)} of a single head's",
        f"layer 1 has {some(own.n_eff_1_median, 1)} of {softmax.n_heads} heads at work, the later ones "
        f"{some(pd.concat([own.n_eff_2_median, own.n_eff_3_median]), 1)}",
        f"one head in each of these costs {some(own.later_refit, 1)} times the risk with a new read-out",
        f"Twice as many steps lower their risk to {some(longer.to_fewer_steps, 2)} of what it was",
    ]


def sixteen(found: Results) -> list[str]:
    """What models of d_x 16 do, one seed."""
    table = screened(several(table_of(found.folder))).query("d_x == 16").set_index("sparsity")
    one, four = table.loc[1], table.loc[4]
    return [
        f"{four.n_eff_1_median:.1f} of 16 heads at work in layer 1 with four entries and {one.n_eff_1_median:.1f} with one",
        f"one head in each later layer costs {four.later_refit:.1f} and {one.later_refit:.1f} times the risk",
        f"lower the risk to {one.to_single_2d:.2f} of a single head's and {one.to_ridge:.2f} of ridge's",
        f"(R² {one['r2_R x']:.2f})",
    ]


TASK = ["d_x", "sparsity", "context_length", "nonzeros", "noise_var", "n_layers"]


def expected(found: Results) -> list[str]:
    """What models do where a few steps of Algorithm 1 have less risk than gradient descent."""
    table = several(table_of(found.folder))
    fairness = found.table("sparse_fairness").set_index(TASK)
    trained = table.set_index(TASK).index.unique()
    small = fairness.loc[trained[trained.get_level_values("d_x") < 24]].algorithm_to_gd
    ratios = fairness.query("n_layers == 3").groupby("d_x").last()
    noisy = fairness.reset_index().query("d_x == 16 and sparsity == 1")
    noisy = noisy.set_index(["noise_var", "n_layers"])
    table = from_random(found)
    models = table.set_index(["d_x", "n_heads"])
    at_24, at_32 = models.loc[(24, 24)], models.loc[(32, 32)]
    (block,) = several(table_of(found.folder)).query("d_x == 24 and mlp").itertuples()
    longer = from_random(found, every=True).dropna(subset=["to_fewer_steps"]).set_index("steps")
    return [
        f"{some(small, 1)} times the risk of gradient descent",
        *(f"{told_ratio(ratios.loc[d_x], 'algorithm_to_gd')} at d_x {d_x}" for d_x in (24, 32)),
        f"({told_ratio(noisy.loc[0.4, 4], 'algorithm_to_gd')} with four layers at noise variance 0.4; "
        f"{told_ratio(noisy.loc[0.8, 3], 'algorithm_to_gd')} with three and "
        f"{told_ratio(noisy.loc[0.8, 4], 'algorithm_to_gd')} with four at 0.8)",
        f"{told_ratio(at_24, 'to_single_2d')} of a single head's risk with 24 heads at d_x 24",
        f"{told_ratio(at_32, 'to_single_2d')} with 32 at d_x 32",
        f"{some(table.to_ridge, 2)} of ridge's and {some(table.to_algorithm, 1)} times that of Algorithm 1 at its best step",
        f"{some(table.n_eff_1_median, 1)} heads at work in layer 1",
        f"of R x one can read at most {table['r2_R x'].max():.2f} behind it",
        *(
            f"{told_ratio(row, 'to_ridge')} after {steps:,}"
            for steps, row in longer.sort_index().iterrows()
        ),
        f"{block.to_ridge:.2f} ± {block.to_ridge_sem:.2f} of ridge's risk after {block.steps:,} steps",
        f"{block.n_eff_1_median:.1f} of {block.n_heads} heads at work in layer 1 and {some([block.n_eff_2_median, block.n_eff_3_median], 1)} in the later ones",
        f"one in each of these costs {block.later_refit:.2f} times the risk with a new read-out, one in the first {block.first_refit:.2f} times",
        f"{some(longer.n_eff_1_median, 1)} heads at work in layer 1, and R x as little (R² {some(longer['r2_R x'], 2)})",
    ]


def kept(found: Results) -> list[str]:
    """What training makes of the construction in such a task."""
    table = found.table("sparse_start_expected")
    last = table[table.step == table.step.max()].set_index("arm")
    alone, others, random = (
        last.loc[arm] for arm in ("built, alone", "built, with other heads", "at random")
    )
    built, start = last.drop("at random"), table[table.step == 0].iloc[0]
    r2 = sorted(built["r2_R x"])
    return [
        f"risk {told_ratio(start, 'to_ridge')} of ridge's; the best two sizes would have "
        f"{start.to_ridge / start.to_algorithm_fixed:.2f})",
        f"bring the risk to {told_ratio(alone, 'to_ridge')} where the later layers have no other heads",
        f"({alone.n_eff_1_median:.1f} heads at work by medians; one of them alone costs {alone.first_refit:.1f} times the risk with a new read-out)",
        f"to {told_ratio(others, 'to_ridge')} where they have, {told_ratio(others, 'to_lasso')} of lasso's",
        f"(one head in each costs {others.later_refit:.1f} times the risk with a new read-out)",
        f"layer 1 comes down to {others.n_eff_1_median:.1f} of them by medians",
        f"(R² {r2[0]:.2f} and {r2[1]:.2f})",
        f"at random weights ends at {told_ratio(random, 'to_ridge')}",
        f"by a factor of {some(random.to_ridge / built.to_ridge, 1)}",
    ]


def in_short(found: Results) -> list[str]:
    """The same for README.md, in a sentence."""
    table = found.table("sparse_start_expected")
    last = table[table.step == table.step.max()].set_index("arm")
    alone, others = last.loc["built, alone"], last.loc["built, with other heads"]
    return [
        f"ends at {some(from_random(found, every=True).to_ridge, 2)} of ridge's risk without it",
        f"ends at {alone.to_ridge:.2f} with one head held in each later layer, {alone.n_eff_1_median:.1f} of 24 heads at work",
        f"at {others.to_ridge:.2f} with others to use, {others.n_eff_1_median:.1f} heads at work",
    ]


def from_random(found: Results, *, every: bool = False) -> pd.DataFrame:
    """The models of linear attention with several heads in such tasks, trained from random weights
    for as long as all, or for any number of steps."""
    table = several(table_of(found.folder))
    table = table if every else screened(table)
    return table.query("d_x >= 24 and score == 'linear/L' and n_layers == 3")


def told_ratio(row: pd.Series, name: str) -> str:
    return f"{row[name]:.2f} ± {row[f'{name}_sem']:.2f}"


def longer(found: Results) -> list[str]:
    """What twice as many steps change."""
    table = several(table_of(found.folder)).dropna(subset=["to_fewer_steps"]).query("not mlp")
    large, small = (table[table.d_x == d_x].to_fewer_steps for d_x in (8, 4))
    return [
        f"at d_x 8 it falls to {some(large, 2)} of what it was",
        f"at d_x 4 to {some(small, 2)}",
    ]


def start(found: Results) -> list[str]:
    writes, ridge, algorithm = (
        found[f"sparse-start-{name}"] for name in ("writes", "ridge", "algorithm")
    )
    alone, helped, random = writes.values
    table = found.table("sparse_start").groupby("arm", sort=False).tail(1).set_index("arm")
    covariance = table["r2 preconditioned x"]["at random"]
    return [
        f"still writes R x in the end (R² {writes.values[helped]:.3f})",
        f"risk is {told(ridge, helped, (3, 3))} of ridge's",
        f"that of Algorithm 1 at its best step ({told(algorithm, helped, (3, 3))})",
        f"ends at {told(ridge, random, (3, 3))} of ridge's",
        f"writes (S − 1) x (R² {covariance:.2f}), not R x ({writes.values[random]:.2f})",
        f"keeps R x nearly (R² {writes.values[alone]:.3f})",
        f"{told(ridge, alone, (2, 2))} times ridge's risk, {told(algorithm, alone, (2, 2))} times that of Algorithm 1",
    ]


def wide(found: Results) -> list[str]:
    ridge, algorithm = found["sparse-wide-ridge"], found["sparse-wide-algorithm-1"]
    (name,) = ridge.values
    table = found.table("sparse_wide").query("part == 'risk'").set_index("learner").risk
    return [
        f"risk {told(ridge, name, (2, 2))} times ridge's, {told(algorithm, name, (1, 1))} times "
        f"Algorithm 1's ({table['Algorithm 1'] / table['ridge']:.2f} of ridge's)",
    ]


def emergence(found: Results) -> list[str]:
    table = found.table("softmax_emergence")
    one = table[(table.arm == "adam") & (table.what == "one sign")]
    more = one[(one.n_heads > 2) & (one.step == one.step.max())]
    seeds, stuck = int(more.seeds.sum()), int(more["count"].sum())
    two = one[one.n_heads == 2].sort_values("step")
    shares = [f"{PERCENT * value:.0f}" for value in two.fraction]
    ended = found.table("softmax_emergence_seeds").query("arm == 'adam' and step == 30_000")
    losses = ended[ended.n_heads == 2].groupby("one_sign").eval_loss.median()
    prediction = found.table("softmax_emergence_prediction").set_index("number").value
    models = found.table("softmax_shipped_models")
    several = models[models.model.str.contains("-h[348]-")]
    debiased = (several.pattern == "debiased_gd").sum()
    return [
        f"({seeds - stuck} of {seeds})",
        f"{', '.join(shares[:-1])} and {shares[-1]}% have one sign",
        f"with a loss of {losses[True]:.2f} in place of {losses[False]:.2f}",
        f"AUC {prediction.auc:.2f}; right for {prediction.accuracy:.0%} of the odd seeds, where "
        f'"never" is right for {prediction.accuracy_of_never:.0%}',
        f"{debiased} of {len(several)} shipped models of three to eight heads",
    ]


def phrases(results: Path) -> dict[str, list[str]]:
    """What each page must say, by its path beside the results' parent."""
    found = Results(results)
    checkpoints = results.parents[1] / "checkpoints"
    # Models of pools are no model of the three papers.
    count = sum(file.parent.name[:5] != "pool-" for file in checkpoints.glob("*/config.json"))
    trained = f"measured again on {count} trained models that are shipped"
    return {
        "../README.md": [
            trained,
            *calibration(found),
            *settings(found),
            widths(found)[0],
            *in_short(found),
        ],
        "README.md": [*emergence(found), *foretold(found), *misses(found)],
        "../docs/how/train.md": speeds.training(results),
        "../docs/linear_attention.md": speeds.flow(results),
        "../docs/how/weights.md": [*classified(found), *calibration(found)],
        "../docs/papers/softmax_attention.md": [
            *foretold(found),
            *one_sign(found),
            *tasks(found),
        ],
        "../docs/papers/sparse_regression.md": [
            *sparse(found),
            *start(found),
            *wide(found),
            *settings(found),
            *widths(found),
            *scores(found),
            *small(found),
            *blocks(found),
            *sixteen(found),
            *expected(found),
            *kept(found),
            *longer(found),
        ],
    }
