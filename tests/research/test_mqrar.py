import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from research.paper_experiments import attention_picture, mqrar
from research.paper_experiments.recall_batches import RecallBatches, recall_batch
from sbeval.models.attention import StickBreakingMixer
from sbeval.tasks.recall.sequences import PAIRS, Mqrar
from sbeval.training.trainer import cosine

TINY = ["--length-tokens", "32", "--vocabulary", "32", "--hidden-size", "16", "--batch-sequences", "4"]
TINY += ["--test-sequences", "5", "--test-every-steps", "2", "--pairs", "3"]


@given(
    pairs=st.integers(1, 6),
    n_back=st.integers(1, 4),
    extra=st.integers(1, 12),
    keys=st.integers(6, 11),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_each_target_is_the_value_its_key_had_n_assignments_ago(pairs, n_back, extra, keys, seed):
    slots, half = pairs * n_back + extra, keys + 1
    setting = Mqrar(length_tokens=2 * slots, pairs=pairs, vocabulary=2 * half, n_back=n_back)
    batch = recall_batch(setting, np.random.default_rng(seed), 3)
    for inputs, positions, targets in zip(batch["input_ids"], batch["positions"], batch["targets"], strict=True):
        asked = dict(zip(positions.tolist(), targets.tolist(), strict=True))
        assert len(asked) == extra
        past: dict[int, list[int]] = {}
        for place in range(0, 2 * slots, 2):
            key, value = inputs[place : place + 2].tolist()
            assert 1 <= key < half <= value < 2 * half
            had = past.setdefault(key, [])
            assert (place in asked) == (place >= 2 * pairs * n_back)
            if place in asked:
                assert asked[place] == had[-n_back]
            assert not had or had[-1] != value
            had.append(value)
        assert len(past) == pairs
        assert sorted(inputs[0 : 2 * pairs * n_back : 2]) == sorted([*past] * n_back)


def test_a_batch_depends_on_its_seed_and_first_index_alone():
    setting = Mqrar(length_tokens=32, pairs=3, vocabulary=32)
    first = RecallBatches(setting, seed=1, count=100).__getitems__([8, 9])[0]
    again = RecallBatches(setting, seed=1, count=100).__getitems__([8, 9])[0]
    other = RecallBatches(setting, seed=2, count=100).__getitems__([8, 9])[0]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_the_defaults_are_the_papers():
    assert sorted(mqrar.LEARNING_RATES) == pytest.approx([1e-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 1e-2])
    assert PAIRS == (32, 64, 96, 128, 160, 192)
    run = mqrar.RecallRun(attention="rope", pairs=32, learning_rate=1e-3, steps=1)
    assert (run.length_tokens, run.layers, run.hidden_size) == (768, 2, 256)
    assert mqrar.new_model(run).config.num_attention_heads == 1


@pytest.mark.parametrize("attention", ["stickbreaking", "rope"])
def test_all_learning_rates_are_tried_until_one_solves_it_and_none_twice(tmp_path, attention, capsys):
    out = tmp_path / "runs.json"
    arguments = ["--attention", attention, *TINY, "--steps", "4", "--out", str(out), "--learning-rates", "1e-3", "1e-2"]
    mqrar.main([*arguments, "--picture"])
    runs = json.loads(out.read_text())
    assert [run["learning_rate"] for run in runs] == [1e-3, 1e-2]
    assert all([point["step"] for point in run["curve"]] == [2, 4] and not run["solved"] for run in runs)
    assert runs[0]["sequences_seen"] == 16
    weights = np.load(tmp_path / "runs.npz")["weights"]
    assert weights.shape == (2, 1, 24, 24)
    capsys.readouterr()
    mqrar.main(arguments)
    assert capsys.readouterr().out == ""

    runs[0]["solved"] = True
    out.write_text(json.dumps(runs[:1]))
    mqrar.main(arguments)
    assert len(json.loads(out.read_text())) == 1


def test_training_teaches_recall(tmp_path):
    run = mqrar.RecallRun(
        attention="rope", pairs=1, length_tokens=8, vocabulary=8, hidden_size=32, learning_rate=1e-2, steps=150
    )
    _, found = mqrar.train(run, tmp_path)
    assert found["accuracy"] > 2 * run.setting.chance


@pytest.mark.parametrize("attention", ["stickbreaking", "rope"])
def test_training_is_adamw_on_the_mean_loss_of_what_is_asked_for(tmp_path, attention, monkeypatch):
    run = mqrar.RecallRun(
        attention=attention, pairs=3, length_tokens=32, vocabulary=32, hidden_size=16, learning_rate=1e-2, steps=20
    )
    order, drawn = [], RecallBatches.__getitems__

    def noted(sequences, indices):
        order.append(indices)
        return drawn(sequences, indices)

    monkeypatch.setattr(RecallBatches, "__getitems__", noted)
    trained, _ = mqrar.train(run, tmp_path)

    model = mqrar.new_model(run).train()
    if attention == "stickbreaking":
        model.set_kernels(impl="reference")
    decayed = [p for name, p in model.named_parameters() if "norm" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    sequences = RecallBatches(run.setting, seed=run.seed, count=run.steps * run.batch_sequences)
    for step in range(run.steps):
        (batch,) = drawn(sequences, order[step])
        every = model(input_ids=batch["input_ids"]).logits
        asked = every[torch.arange(run.batch_sequences)[:, None], batch["positions"]]
        torch.nn.functional.cross_entropy(asked.flatten(0, 1), batch["targets"].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate * cosine(step, steps=run.steps, warmup_steps=2)
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), other in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-4, msg=name)


def test_pictured_weights_are_those_the_model_uses():
    run = mqrar.RecallRun(
        attention="stickbreaking", pairs=3, length_tokens=16, vocabulary=32, hidden_size=16, learning_rate=1.0, steps=1
    )
    model = mqrar.new_model(run)
    mixed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in model.modules():
        if isinstance(module, StickBreakingMixer):
            module.register_forward_hook(lambda _, args, output: mixed.append((args[2], output)))
    inputs = torch.arange(1, 17)[None]
    tokens, weights = attention_picture.attention_weights(model, inputs)
    assert tokens.tolist() == inputs[0].tolist()
    assert len(mixed) == 2
    for layer, (values, output) in enumerate(mixed):
        torch.testing.assert_close(torch.from_numpy(weights[layer]).float() @ values[0], output[0], rtol=0, atol=1e-3)


def test_a_picture_has_titles_axes_and_a_square_where_weight_is_given(tmp_path):
    weights = np.zeros((2, 1, 3, 3))
    weights[1, 0, 2, 0] = 0.75
    figure = attention_picture.attention_figure(weights, title="of a test")
    first, second = figure["concat"]
    assert (figure["title"]["text"], first["title"]["text"], second["title"]["text"]) == (
        "of a test",
        "layer 1",
        "layer 2",
    )
    assert first["data"]["values"] == []
    assert second["data"]["values"] == [{"query": 2, "key": 0, "weight": 0.75}]
    assert first["encoding"]["y"]["scale"]["reverse"]
    assert (first["encoding"]["x"]["title"][:3], first["encoding"]["y"]["title"][:5]) == ("key", "query")
    np.savez(tmp_path / "weights.npz", weights=weights)
    attention_picture.main([str(tmp_path / "weights.npz"), str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
