"""Models that accelerate has spread over devices or disk, as `parallelize=True` does."""

from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks

from sbeval.model_adapters.speed.faster import make_faster
from sbeval.scoring.scorer import TokenScorer
from tests.model_adapters.small import odd

TOKENS = torch.arange(40)[None]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "stickbreaking"])
@pytest.mark.parametrize("offloaded", [False, True])
@torch.no_grad()
def test_a_model_spread_over_devices_keeps_its_own_parts_and_results(
    architecture: str, offloaded: bool, tmp_path: Path
) -> None:
    model = odd(architecture)
    expected = model(TOKENS).logits
    body = model.base_model_prefix
    pieces = [f"{body}.{name}" for name, _ in model.base_model.named_children() if name != "layers"]
    pieces += [f"{body}.layers.{index}" for index in range(len(model.base_model.layers))]
    pieces += [name for name, _ in model.named_children() if name != body]
    keys = getattr(model, "_skip_keys_device_placement", None)
    if offloaded:
        places = {piece: "disk" if ".layers." in piece else "cpu" for piece in pieces}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, skip_keys=keys)
    else:  # the hooks of a model on several devices, all of which are the CPU here
        attach_align_device_hook_on_blocks(
            model, dict.fromkeys(pieces, "cpu"), dict.fromkeys(pieces, False), skip_keys=keys
        )
    assert not make_faster(model)
    assert torch.equal(model(TOKENS).logits, expected)
    positions = torch.arange(20, 30)
    found = TokenScorer(model).score(TOKENS, torch.zeros_like(positions), positions, positions + 1)
    logprobs = expected[0, positions].log_softmax(-1).gather(1, positions[:, None] + 1)[:, 0]
    torch.testing.assert_close(found.logprobs, logprobs)
