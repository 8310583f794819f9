"""The training length that a configuration states is read by one rule, for results files and for extensions."""

from types import SimpleNamespace
from typing import Any

import pytest

from sbeval.checkpoints.facts import training_length_tokens

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "sbeval", "training_length_tokens": 40, "max_position_embeddings": 96}, 40),
        ({"model_type": "sbeval", "training_length_tokens": None, "max_position_embeddings": 96}, None),
        ({"max_position_embeddings": 96}, 96),
        ({"n_positions": 96}, 96),
        ({"rope_parameters": YARN, "max_position_embeddings": 96}, 24),
        ({"rope_parameters": {"full_attention": YARN}, "max_position_embeddings": 96}, 24),
        ({"original_max_position_embeddings": 24, "max_position_embeddings": 96}, 24),
        ({"text_config": SimpleNamespace(max_position_embeddings=96)}, 96),
        ({"max_position_embeddings": -1}, None),
        ({}, None),
    ],
)
def test_the_training_length_is_the_one_before_any_scaling(config: dict[str, Any], length: int | None) -> None:
    assert training_length_tokens(SimpleNamespace(**config)) == length
