"""lm-eval's `--use_cache`: a killed run resumes, and never reads another run's answers."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from lm_eval.api.model import CachingLM
from sqlitedict import SqliteDict

from sbeval.errors import UserError
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.record import run_settings, stamp
from tests.model_adapters.small import copied, load_lm, save_lora


def test_a_cache_made_before_a_file_changed_in_place_is_refused(checkpoint, tmp_path):
    folder, database = copied(checkpoint("llama"), tmp_path), str(tmp_path / "cache.db")
    for _ in range(2):
        CachingLM(load_lm(folder), database).dbdict.close()
    file = folder / "generation_config.json"
    file.write_text(file.read_text().replace("{", '{"repetition_penalty": 3.0,', 1))
    with pytest.raises(UserError, match=r"generation_config\.json changed"):
        CachingLM(load_lm(folder), database)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"max_length": 64}, "max_length=128 instead of 64"),
        ({"dtype": "bfloat16"}, "dtype='torch.float32' instead of 'torch.bfloat16'"),
        ({"rope_scaling": "linear:2"}, "rope_scaling=None instead of"),
        ({"add_bos_token": True}, "add_bos_token=None instead of True"),
        ({"training_length": 64}, "training_length=None instead of 64"),
        ({"truncation": "error"}, "truncation='left' instead of 'error'"),
        ({"attn_implementation": "eager"}, "kernels='sdpa' instead of 'eager'"),
        ({"think_end_token": "x"}, "think_end_token=None instead of 'x'"),
        ({"chat_template_args": {"depth": 2}}, "arguments={} instead of {'chat_template_args': {'depth': 2}}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_cache_made_with_other_settings_is_refused(options, difference, checkpoint, tmp_path):
    database = str(tmp_path / "cache.db")
    CachingLM(load_lm(checkpoint("llama")), database).dbdict.close()
    with pytest.raises(UserError, match=f"found one made with .*{difference}"):
        CachingLM(load_lm(checkpoint("llama"), **options), database)
    CachingLM(load_lm(checkpoint("llama")), database).dbdict.close()


def test_a_cache_of_another_adapter_at_the_same_place_is_refused(checkpoint, tmp_path):
    database, folder = str(tmp_path / "cache.db"), checkpoint("llama")
    for seed, difference in ((0, None), (0, None), (1, r"other inputs \(peft: weights changed\)")):
        adapter = save_lora(tmp_path / "adapter", folder, "q_proj", seed=seed)
        with pytest.raises(UserError, match=difference) if difference else contextlib.nullcontext():
            CachingLM(load_lm(folder, peft=adapter), database).dbdict.close()


def test_settings_that_change_no_answer_go_on_with_a_cache(checkpoint, tmp_path):
    database = str(tmp_path / "cache.db")
    for options in ({}, {"batch_size": 4, "max_batch_tokens": 512}, {"logits_cache": False, "trust_remote_code": True}):
        CachingLM(load_lm(checkpoint("llama"), **options), database).dbdict.close()


def test_every_option_of_the_adapter_is_stamped_but_the_batch_size(checkpoint):
    stamped = run_settings(load_lm(checkpoint("llama")).session)
    # a cache with context_parallel is refused, unread tensors change no number, and "cache" has the size of its chunks
    apart = {"max_batch_tokens", "draft_tokens", "context_parallel", "allow_unread", "cache_chunk"}
    assert AdapterOptions.model_fields.keys() - set(stamped) == apart


def test_of_two_models_that_start_together_one_has_the_cache(tmp_path):
    barrier = threading.Barrier(2)

    class Meeting(SqliteDict):  # type: ignore[misc]
        def get(self, *arguments: Any) -> Any:
            """Waits until both have read."""
            held = super().get(*arguments)
            barrier.wait()
            return held

    def start(name: str) -> str | None:
        with Meeting(str(tmp_path / "cache.db"), autocommit=True) as database:
            try:
                stamp(database, {"inputs": {"weights": name}})
            except UserError:
                return "refused"
            return None

    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(start, ("this", "that"))) == {None, "refused"}


def test_a_cache_without_settings_is_refused(checkpoint, tmp_path):
    database = str(tmp_path / "cache.db")
    with SqliteDict(database, autocommit=True) as unstamped:
        unstamped["0123"] = (-1.0, True)
    with pytest.raises(UserError, match="found one without its settings: name another file"):
        CachingLM(load_lm(checkpoint("llama")), database)
