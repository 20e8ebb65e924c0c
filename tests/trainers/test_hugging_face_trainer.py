"""The callback in Hugging Face's own Trainer."""

from pathlib import Path

import pytest

from tests.trainers.loop import PROMPTS, Model, assert_watched, monitor

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.mark.slow
def test_it_watches_a_trainer(tmp_path: Path):
    from mechinterp.callbacks import HuggingFaceCallback

    rows, model = [], Model()
    watched = monitor(rows)
    rows_of_data = [
        {"tokens": tokens, "labels": y}
        for tokens, y in zip(PROMPTS.tokens, PROMPTS.y_query, strict=True)
    ]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=8,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows_of_data,
        callbacks=[HuggingFaceCallback(watched)],
    )
    trainer.train()
    assert_watched(watched, rows, model)
