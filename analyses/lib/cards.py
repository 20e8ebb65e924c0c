"""Model cards of the shipped models: `python -m analyses.lib.cards` writes README.md into every
folder of checkpoints/."""

from pathlib import Path

from mechinterp import load
from mechinterp.report.hub import card_with_verdict

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def main() -> None:
    for folder in sorted(CHECKPOINTS.iterdir()):
        card = folder / "README.md"
        card.write_text(card_with_verdict(load(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
