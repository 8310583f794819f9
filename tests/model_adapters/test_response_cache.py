"""lm-eval's `--use_cache`: a killed run goes on where it was, and never reads another run's answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.model import CachingLM

from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from tests.model_adapters.small import Checkpoints, english, instances

LINES = [line for line in english().splitlines() if line]
REQUESTS: dict[str, list[tuple[Any, ...]]] = {
    "loglikelihood": [(line[:9], line[9:]) for line in LINES],
    "loglikelihood_rolling": [(line,) for line in LINES],
    "generate_until": [(line, {"until": ["e"], "max_gen_toks": 4}) for line in LINES],
}


class Killed(BaseException):
    pass


def load(folder: Path, **kwargs: Any) -> StickBreakingLM:
    return StickBreakingLM(str(folder), device="cpu", **{"dtype": "float32", **kwargs})


@pytest.mark.parametrize("kind", list(REQUESTS))
def test_a_killed_run_repeats_no_finished_request(kind: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    expected = getattr(load(checkpoint("llama")), kind)(instances(kind, REQUESTS[kind]), disable_tqdm=True)
    lm = load(checkpoint("llama"))
    cached = CachingLM(lm, str(tmp_path / "cache.db"))
    add = lm.cache_hook.add_partial
    finished = 0

    def dies_after_five(*args: Any) -> None:
        nonlocal finished
        add(*args)
        finished += 1
        if finished == 5:
            raise Killed

    lm.cache_hook.add_partial = dies_after_five
    with pytest.raises(Killed):
        getattr(cached, kind)(instances(kind, REQUESTS[kind]))
    cached.dbdict.close()

    resumed = load(checkpoint("llama"))
    again = CachingLM(resumed, str(tmp_path / "cache.db"))
    added: list[Any] = []
    add_again = resumed.cache_hook.add_partial
    resumed.cache_hook.add_partial = lambda *args: (added.append(args), add_again(*args))
    found = getattr(again, kind)(instances(kind, REQUESTS[kind]))
    assert len(added) == len(REQUESTS[kind]) - 5
    if kind == "loglikelihood":
        found, expected = [score for score, _ in found], [score for score, _ in expected]
    assert found == (expected if kind == "generate_until" else pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"max_length": 64}, "max_length=128 instead of 64"),
        ({"dtype": "bfloat16"}, "dtype='torch.float32' instead of 'torch.bfloat16'"),
        ({"rope_scaling": "linear:2"}, "rope_scaling=None instead of"),
        ({"add_bos_token": True}, "add_bos_token=None instead of True"),
        ({"training_length": 64}, "training_length=None instead of 64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_cache_made_with_other_settings_is_refused(
    options: dict[str, Any], difference: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    database = str(tmp_path / "cache.db")
    CachingLM(load(checkpoint("llama")), database).dbdict.close()
    with pytest.raises(UserError, match=f"found one made with {difference}"):
        CachingLM(load(checkpoint("llama"), **options), database)
    CachingLM(load(checkpoint("llama")), database).dbdict.close()


def test_a_cache_made_by_another_model_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    database = str(tmp_path / "cache.db")
    CachingLM(load(checkpoint("llama")), database).dbdict.close()
    with pytest.raises(UserError, match="found one made with configuration="):
        CachingLM(load(checkpoint("mistral")), database)


def test_a_cache_made_with_other_weights_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    database = str(tmp_path / "cache.db")
    lm = load(checkpoint("llama"))
    CachingLM(lm, database).dbdict.close()
    with torch.no_grad():
        lm.model.lm_head.weight[3] += 1
    lm.model.save_pretrained(tmp_path / "trained")
    lm.tokenizer.save_pretrained(tmp_path / "trained")
    with pytest.raises(UserError, match="found one made with model="):
        CachingLM(load(tmp_path / "trained"), database)


def test_a_cache_without_settings_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    from sqlitedict import SqliteDict

    database = str(tmp_path / "cache.db")
    with SqliteDict(database, autocommit=True) as unstamped:
        unstamped["0123"] = (-1.0, True)
    with pytest.raises(UserError, match="found one without its settings: name another file"):
        CachingLM(load(checkpoint("llama")), database)
