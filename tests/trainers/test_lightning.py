"""The callback in Lightning's own Trainer."""

from pathlib import Path

import pytest
import torch

from tests.trainers.loop import PROMPTS, Model, assert_watched, monitor

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_watches_a_trainer(tmp_path: Path):
    from mechinterp.callbacks import LightningCallback

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: list, index: int) -> torch.Tensor:
            return self.model(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    rows, module = [], Lit()
    watched = monitor(rows)
    data = torch.utils.data.TensorDataset(PROMPTS.tokens, PROMPTS.y_query)
    trainer = lightning.Trainer(
        max_steps=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[LightningCallback(watched, "model")],
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, 8))
    assert_watched(watched, rows, module.model)
