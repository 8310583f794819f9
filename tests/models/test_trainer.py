from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from sbeval.models import SbevalForCausalLM
from tests.models.small import small_config, tokens


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("attention", ["stickbreaking", "rope"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_learns_a_sequence_by_heart(attention: str, bf16: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SbevalForCausalLM(small_config(attention=attention, initializer_range=0.05))
    row = tokens(1, 16)[0]
    rows = [{"input_ids": row, "labels": row}] * 8
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        bf16=bf16,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    before = model(row[None], labels=row[None]).loss.item()
    trainer.train()
    model.eval()
    with torch.no_grad():
        assert model(row[None], labels=row[None]).loss.item() < 0.1 * before
