from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, normalize
from torch.testing import assert_close
from written_out import stick_breaking

from sbeval.checkpoints import load_checkpoint
from sbeval.errors import UserError
from tests.checkpoints.layouts import Made, affine, drawn, save

E, HEADS, HEAD_DIM, INNER, VOCAB, LAYERS, EXPERTS, CHOSEN, GATE = 24, 3, 4, 20, 41, 2, 5, 2, 16
IDS = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(2))


def checkpoint(gate: str) -> Made:
    rand, width = drawn(0, 0.4), HEADS * HEAD_DIM
    config = {"model_type": "moduleformer", "vocab_size": VOCAB, "n_embd": E, "n_layer": LAYERS, "n_head": HEADS}
    config |= {"att_hidden": width, "ffd_hidden": INNER, "n_att_experts": EXPERTS, "n_mlp_experts": EXPERTS}
    config |= {"k_att": CHOSEN, "k_mlp": CHOSEN, "gating_size": GATE, "gate_type": gate}
    config |= {"block_size": 24, "history_length": 8}
    t = {"transformer.wte.weight": rand(VOCAB, E), "lm_head.weight": rand(VOCAB, E)}
    t |= {"transformer.ln_f.weight": rand(E, mean=1.0), "transformer.ln_f.bias": rand(E)}
    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        for name in ("ln_1", "ln_2"):
            t |= {f"{h}.{name}.weight": rand(E, mean=1.0), f"{h}.{name}.bias": rand(E)}
        for name in ("k_proj", "v_proj"):
            t |= {f"{h}.attn.{name}.weight": rand(width, E), f"{h}.attn.{name}.bias": rand(width)}
        t |= {f"{h}.attn.mask": torch.ones(4, 4, dtype=torch.int8), f"{h}.attn.cum_weight": torch.ones(4, 4)}
        for name, inner in ((f"{h}.attn.q_proj", width), (f"{h}.mlpf", INNER)):
            t |= {f"{name}.experts.weight": rand(EXPERTS, E, inner)}
            t |= {f"{name}.output_experts.weight": rand(EXPERTS, inner, E)}
            if gate == "mlp":
                t |= {f"{name}.gate.w_gate.0.weight": rand(GATE, E), f"{name}.gate.w_gate.0.bias": rand(GATE)}
                t |= {f"{name}.gate.w_gate.3.weight": rand(EXPERTS, GATE)}
            elif gate == "linear":
                t |= {f"{name}.gate.w_gate.0.weight": rand(EXPERTS, E)}
            else:
                t |= {f"{name}.gate.w_gate.weight": rand(GATE, E), f"{name}.gate.temperature": rand(1)}
                t |= {f"{name}.gate.expert_centroids": rand(EXPERTS, GATE)}
    return config, t


def written_out(gate: str, t: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The layout's forward pass, one token, expert and key at a time."""

    def choose(x: Tensor, name: str) -> list[tuple[int, float]]:
        if gate == "mlp":
            logits = affine(gelu(affine(x, t, f"{name}.gate.w_gate.0")), t, f"{name}.gate.w_gate.3")
        elif gate == "linear":
            logits = affine(x, t, f"{name}.gate.w_gate.0")
        else:
            near = normalize(affine(x, t, f"{name}.gate.w_gate"), dim=0)
            logits = normalize(t[f"{name}.gate.expert_centroids"], dim=1) @ near * t[f"{name}.gate.temperature"].exp()
        probabilities = logits.softmax(0)
        return [
            (int(expert), float(probabilities[expert])) for expert in probabilities.argsort(descending=True)[:CHOSEN]
        ]

    x = t["transformer.wte.weight"][ids]
    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        normed = layer_norm(x, (E,), t[f"{h}.ln_1.weight"], t[f"{h}.ln_1.bias"], 1e-5)
        k, v = (affine(normed, t, f"{h}.attn.{name}").view(len(ids), HEADS, HEAD_DIM) for name in ("k_proj", "v_proj"))
        heads_of = [
            stick_breaking((normed @ weight).view(k.shape), k, v, HEAD_DIM**-0.5, attend_current=True)[0].flatten(1)
            for weight in t[f"{h}.attn.q_proj.experts.weight"]
        ]
        attended = torch.zeros_like(x)
        for j in range(len(ids)):
            for expert, probability in choose(normed[j], f"{h}.attn.q_proj"):
                output = t[f"{h}.attn.q_proj.output_experts.weight"][expert]
                attended[j] += probability * heads_of[expert][j] @ output
        x = x + attended
        normed = layer_norm(x, (E,), t[f"{h}.ln_2.weight"], t[f"{h}.ln_2.bias"], 1e-5)
        mixed = torch.zeros_like(x)
        for j in range(len(ids)):
            for expert, probability in choose(normed[j], f"{h}.mlpf"):
                inner = gelu(normed[j] @ t[f"{h}.mlpf.experts.weight"][expert], approximate="tanh")
                mixed[j] += probability * inner @ t[f"{h}.mlpf.output_experts.weight"][expert]
        x = x + mixed
    final = layer_norm(x, (E,), t["transformer.ln_f.weight"], t["transformer.ln_f.bias"], 1e-5)
    return final @ t["lm_head.weight"].T


@pytest.mark.parametrize("gate", ["mlp", "linear", "gmm"])
def test_moduleformer_gives_its_layouts_logits(gate: str, tmp_path: Path) -> None:
    config, tensors = checkpoint(gate)
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    assert (loaded.format, loaded.attention, loaded.training_length_tokens) == ("moduleformer", "stickbreaking", 32)
    with torch.no_grad():
        output = loaded.model(IDS).logits
    for row in range(2):
        assert_close(output[row], written_out(gate, tensors, IDS[row]), rtol=1e-4, atol=1e-4)


def test_generation_with_the_cache_and_with_padding_equals_plain_generation(tmp_path: Path) -> None:
    model: Any = load_checkpoint(save(tmp_path, *checkpoint("mlp"))).model
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(IDS, **options)
    assert torch.equal(cached, model.generate(IDS, use_cache=False, **options))
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    padded = model.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(padded[1, -8:], model.generate(IDS[1:, 4:], **options)[0, -8:])
    assert torch.equal(padded[0], cached[0])


def test_moduleformer_is_for_evaluation_only_and_an_unknown_gate_is_refused(tmp_path: Path) -> None:
    config, tensors = checkpoint("mlp")
    model = load_checkpoint(save(tmp_path / "theirs", config, tensors)).model
    with pytest.raises(UserError, match="evaluation only"):
        model.save_pretrained(tmp_path / "ours")
    with pytest.raises(UserError, match="gate_type"):
        load_checkpoint(save(tmp_path, {**config, "gate_type": "hash"}, tensors))
