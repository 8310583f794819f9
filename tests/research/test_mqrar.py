"""The batches that MQRAR models are trained on hold the task that `sbeval.tasks.recall` asks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from research.paper_experiments.recall_batches import recall_batch
from sbeval.tasks.recall.sequences import Mqrar


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
