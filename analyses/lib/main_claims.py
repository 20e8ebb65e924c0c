"""The main claims of each paper, for its page in docs/papers, and those that lead a family of claims, for
README.md; numbers and verdicts are those of the records."""

from collections.abc import Iterable

from analyses.lib.records import Record

Row = tuple[str, str, str]


class Found:
    """Records by their ids."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = {record.id: record for record in records}

    def __getitem__(self, id: str) -> Record:
        return self.records[id]

    def of(self, *starts: str, without: str = "nothing") -> list[Record]:
        """All records whose ids start so."""
        found = [one for name, one in self.records.items() if name.startswith(starts)]
        return [one for one in found if without not in one.id]


def verdict(records: Iterable[Record]) -> str:
    """Of several clauses together."""
    found = list(records)
    if len(found) == 1:
        return found[0].verdict
    count = sum(record.verdict == "holds" for record in found)
    if count == len(found):
        return "holds"
    return f"holds for {count} of {len(found)} clauses" if count else "does not hold"


def span(records: Iterable[Record], digits: int = 3, *, percent: bool = False) -> str:
    """The range of the values of several records."""
    values = [value for record in records for value in record.values.values()]
    ends = [f"{end:.1%}" if percent else f"{end:.{digits}f}" for end in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def least(record: Record, digits: int) -> str:
    return f"{min(record.values.values()):.{digits}f}"


def one_sign(found: Found, *arms: str) -> str:
    """Seeds of one sign in several arms together."""
    records = [found[f"softmax-emergence-signs-{arm}"] for arm in arms]
    count = sum(round(one.values["share"] * int(one.over["seeds"])) for one in records)
    return f"{count} of {sum(int(one.over['seeds']) for one in records)}"


def softmax_rows(found: Found) -> list[Row]:
    heads = [found[f"softmax-S1-{name}"] for name in ("smoother", "theory-omega", "theory-mu")]
    signs = "softmax-emergence-signs-"
    modes = ("softmax-M-I", "softmax-M-loss")
    return [
        (
            "**Softmax heads.** Several heads are one step of debiased gradient descent, step size "
            "0.879",
            f"{found['softmax-both-signs'].measured} models of 2 to 8 heads: R² at least "
            f"{least(found['softmax-step-r2'], 4)} (a vanilla step's is lower by "
            f"{least(found['softmax-step-vanilla'], 4)} or more), step "
            f"{span([found['softmax-step-size']])}, loss "
            f"{found['softmax-million-both-signs'].measured}",
            verdict([found["softmax-both-signs"]]),
        ),
        (
            "one head is a kernel smoother, omega 0.447, mu 1.628 within 20%",
            f"a kernel smoother in {heads[0].measured}; omega {span(heads[1:2])}, "
            f"mu {span(heads[2:], 2)}",
            verdict(heads),
        ),
        (
            "**Their training.** Heads of both signs appear consistently",
            f"two heads: one sign in {found[signs + 'adam-h2'].text}, and still at step 500,000 "
            f"in {one_sign(found, 'stuck-h2')} of these; three heads and more: "
            f"{one_sign(found, 'adam-h3', 'adam-h4', 'adam-h8')}. From small weights "
            f"{found[signs + 'small-init-h2'].text}, with plain SGD {found[signs + 'sgd-h2'].text}",
            verdict(found.of(f"{signs}adam")),
        ),
        (
            "**Other score functions.** Omega and mu of table 1, a head of either sign",
            f"{found['softmax-A1-signs'].measured} models have both signs (some of 1 + Cx do not "
            "train); of these all have omega and mu within 8%, products within 2%"
            if verdict(found.of("softmax-A1-omega", "softmax-A1-mu", "softmax-A1-product"))
            == "holds"
            else "see the table of claims",
            verdict([found["softmax-A1-signs"]]),
        ),
        (
            "all score functions give the same predictor",
            "loss beside the best debiased step's, same prompts: 1 + tanh "
            f"{span([found['softmax-A1-loss-tanh']], percent=True)}, (1 + Cx)² "
            f"{span(found.of('softmax-A1-loss-square'), percent=True)}",
            verdict(found.of("softmax-A1-loss")),
        ),
        (
            "**Correlated covariates.** A preconditioned step, the two QK opposite within 5%",
            f"{found['softmax-N1-preconditioned'].measured} pairs, "
            f"{span(found.of('softmax-N1-debiased'), percent=True)} from the best one; "
            f"opposite within {span(found.of('softmax-N1-opposite'), percent=True)}",
            verdict(found.of("softmax-N1")),
        ),
        (
            "**Several tasks.** Two with a vector each (the published code): Modes I to IV",
            f"pairs of heads in {found['softmax-M-III-pairs'].measured} (four heads), "
            f"superposition in {found['softmax-M-IV-superposition'].measured} (three)",
            verdict(found.of(*modes, without="shared")),
        ),
        (
            "the same, if tasks share one vector (the published text)",
            f"pairs in {found['softmax-M-III-pairs-shared'].measured}: each response learns from "
            "the other one too, towards the [best joint step](#two-tasks-with-one-vector)",
            verdict([one for one in found.of(*modes) if "shared" in one.id]),
        ),
        (
            "late drift mu ~ t^(1/2), omega ~ t^(-1/2)",
            f"t^{span([found['softmax-T6-half-mu']])}, t^{span([found['softmax-T6-half-omega']])}",
            verdict(found.of("softmax-T6-half")),
        ),
        (
            "linear attention fails beyond its length, softmax does not",
            f"loss at L = 100 over that at 40: {span([found['softmax-L1-linear']], 1)} and "
            f"{span([found['softmax-L1-softmax']], 2)}",
            verdict(found.of("softmax-L1")),
        ),
    ]


def counted(found: Found, id: str) -> str:
    """A range, and how many values hold."""
    record = found[id]
    return f"{record.measured} ({len(record.holding)} of {record.n})"


def linear_rows(found: Found) -> list[Row]:
    return [
        (
            "**Linear attention.** The loss of merged heads drops once, that of separate ones once per "
            "direction",
            f"merged: one drop in {found['linear-5-merged-drops'].measured}; separate, four "
            f"directions: {found['linear-5-separate-init0.01'].measured}",
            verdict(found.of("linear-5-")),
        ),
        (
            "between the drops: principal component regression, levels of eq. (19)",
            f"levels within {found['linear-10-levels-init0.01'].measured}, relative squared "
            f"distance {found['linear-15-largest-init0.01'].measured} (init 0.01)",
            verdict(found.of("linear-10-", "linear-15-")),
        ),
        (
            "value weights follow eq. (21)",
            f"median error {found['linear-12-median-init0.01'].measured}; of single drops "
            f"{counted(found, 'linear-12-single-init0.01')} within 1% at init 0.01, "
            f"{counted(found, 'linear-12-single-init0.001')} at 0.001",
            verdict(found.of("linear-12-")),
        ),
        (
            "rank R: long stays where R divides m, as 1/init, and short ones elsewhere",
            f"init / 10 multiplies them by {span(found.of('linear-16-long'), 1)} and "
            f"{span(found.of('linear-16-short'), 1)}",
            verdict(found.of("linear-16-long", "linear-16-short")),
        ),
        (
            "**Its jumps** (not asked). Predicted from the initial weights",
            f"median errors {found['linear-13-median-init0.01'].measured}; single ones "
            f"{counted(found, 'linear-13-single-init0.01')} within 2% at init 0.01",
            verdict(found.of("linear-13-")),
        ),
    ]


def sparse_rows(found: Found) -> list[Row]:
    return [
        (
            "**Sparse regression.** Algorithm 1 as a hand-built model of many layers and heads",
            f"predictions equal: {found.of('sparse-C1-')[0].measured}",
            verdict(found.of("sparse-C1-", "sparse-C2-", "sparse-C3-")),
        ),
        (
            "**Its trained models.** Several heads help (C9), the first layer uses them (C10), later "
            "ones need one (C11)",
            "12 models, see C9 to C13 among all claims",
            verdict(found.of("sparse-C9-", "sparse-C10-", "sparse-C11-", without="-wide")),
        ),
    ]


PAPERS = {
    "softmax_attention": softmax_rows,
    "linear_attention": linear_rows,
    "sparse_regression": sparse_rows,
}
"""What makes the rows of each paper's page."""


def rows(records: Iterable[Record], paper: str) -> list[Row]:
    """All rows of one paper."""
    return PAPERS[paper](Found(records))


def leads(records: Iterable[Record]) -> list[Row]:
    """The row that leads each family of claims; its name is in bold."""
    found = Found(records)
    every = [row for make in PAPERS.values() for row in make(found)]
    return [row for row in every if row[0].startswith("**")]
