"""What is generated in slots and what is not, with the reason in the log."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from lm_eval.models.huggingface import HFLM

from sbeval.model_adapters.batching import DoesNotFit
from sbeval.model_adapters.generate.slots.served import most_drafts, why_not_model
from sbeval.model_adapters.generate.slots.stepper import Stepper
from sbeval.model_adapters.lm import StickBreakingLM
from tests.model_adapters.generate.slots import LINES
from tests.model_adapters.generate.slots import answers as answers_of
from tests.model_adapters.small import Checkpoints, load_lm, save_lora
from tests.models.small import small_model

LINES = LINES[:4]


def answers(lm: Any, **setting: Any) -> list[str]:
    return answers_of(lm, {"until": ["\n\n"], "max_gen_toks": 12, **setting}, LINES)


def adapter(folder: Path, **options: Any) -> StickBreakingLM:
    return load_lm(folder, batch_size=2, **options)


def test_a_model_with_an_adapter_of_peft_goes_the_old_way(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("llama")
    lora = save_lora(tmp_path, folder, "q_proj")
    with caplog.at_level(logging.WARNING):
        found = answers(adapter(folder, peft=lora))
    assert "transformers' own loop, which is slower: the model has a PEFT adapter" in caplog.text
    assert found == answers(HFLM(str(folder), peft=lora, device="cpu", dtype="float32", batch_size=1))


def test_a_model_spread_on_devices_goes_the_old_way(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    lm = adapter(checkpoint("llama"))
    expected = answers(lm)
    pieces = {name: "cpu" for name, _ in lm.model.named_modules() if name.count(".") == 2}
    attach_align_device_hook_on_blocks(lm.model, pieces, dict.fromkeys(pieces, False))
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    assert "the model is on several devices" in caplog.text


def test_a_cache_that_a_config_names_changes_nothing(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    lm = adapter(checkpoint("gemma3"))
    expected = answers(lm)
    lm.model.generation_config.cache_implementation = "hybrid"
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    assert "own loop" not in caplog.text


@pytest.mark.parametrize("named", [True, False])
def test_an_end_that_comes_early_is_put_off_as_transformers_does(named: bool, checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    lm = adapter(folder)
    prompt = torch.tensor([lm.tok_encode(LINES[0])])
    first = int(lm.model.generate(prompt, max_new_tokens=3, do_sample=False)[0, -1])
    hf = HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    assert len(answers(hf)[0]) > len(hf.tokenizer.decode([first]))
    for each in (lm, hf):
        each.tokenizer.eos_token = each.tokenizer.convert_ids_to_tokens(first)  # ends a text as a stop sequence does
        each.model.generation_config.eos_token_id = first if named else None
    found = answers(lm, min_new_tokens=8)
    assert found == answers(hf, min_new_tokens=8)
    assert (len(lm.tok_encode(found[0])) >= 8) is named


def test_no_memory_for_trying_a_model_is_one_sentence(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    lm = adapter(checkpoint("llama"))
    monkeypatch.setattr(Stepper, "start", too_large)
    with pytest.raises(DoesNotFit, match="beside the model"):
        answers(lm)


@pytest.mark.parametrize(("heads", "drafts"), [(2, 31), (64, 0), (66, 0)])
def test_queries_to_a_key_head_limit_what_a_step_looks_up(heads: int, drafts: int) -> None:
    sizes = {"hidden_size": 2 * heads, "head_dim": 2, "num_hidden_layers": 1}
    assert most_drafts(small_model(num_attention_heads=heads, num_key_value_heads=1, **sizes)) == drafts


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attention": "alibi", "sliding_window": 32}, "attention of the kind alibi with a sliding window needs"),
        ({"attention": "nape", "sliding_window": 32}, "attention of the kind nape with a sliding window needs"),
        ({"attention": "fire"}, "attention of the kind fire needs the positions of keys"),
        ({"attention": "forgetting"}, "attention of the kind forgetting needs the positions of keys"),
        ({"attention": "alibi"}, None),
    ],
)
def test_a_bias_that_needs_the_positions_of_keys_is_refused_in_slots(
    fields: dict[str, Any], reason: str | None, checkpoint: Checkpoints
) -> None:
    lm = adapter(checkpoint("rope"))
    model = small_model(**fields, vocab_size=lm.model.config.vocab_size)
    answer = why_not_model(dataclasses.replace(lm.opened, model=model))
    assert answer is None if reason is None else reason in str(answer)
