import json

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from training_problems import CONTEXT_TOKENS, save_tiny_llama, tiny_extension, tiny_model
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from sbeval.checkpoints.load import load_checkpoint
from sbeval.checkpoints.weight_files import weights_sha256
from sbeval.errors import UserError
from sbeval.models import SbevalForCausalLM, held_rope_frequencies
from sbeval.rope_parameters import parse_rope_scaling
from sbeval.training.command import extend_command
from sbeval.training.document_loss import DocumentMaskedLoss, bucketed_loss, segments
from sbeval.training.extend import extend
from sbeval.training.recipe import OptimizationSettings
from sbeval.training.text.arrays import load_arrays
from sbeval.training.text.tokenizer import load_tokenizer, save_tokenizer
from sbeval.training.trainer import next_token_loss
from sbeval.training.windows import TrainingWindows


@pytest.fixture(scope="module", params=["stickbreaking", "rope"])
def parent(request, tmp_path_factory, data_folder):
    folder = tmp_path_factory.mktemp("parents") / f"parent_{request.param}"
    tiny_model(request.param).save_pretrained(folder)
    save_tokenizer(load_tokenizer(data_folder / "tokenizer" / "tokenizer.json"), folder)
    return folder


def is_rope(parent) -> bool:
    return parent.name.endswith("rope")


def test_extension_stopped_and_resumed_loses_and_repeats_no_step(tmp_path, parent, data_folder):
    changes = {"rope_scaling": "dynamic:4"} if is_rope(parent) else {}
    extension = tiny_extension(parent, data_folder, **changes)
    whole = extend(extension, tmp_path / "whole")
    parts = None
    for _ in range(8):
        parts = extend(extension, tmp_path / "parts", max_seconds=0.0)
        if parts is not None:
            break
    runs = [json.loads(line) for line in (tmp_path / "parts" / "runs.jsonl").read_text().splitlines()]
    assert [(run["first_step"], run["last_step"]) for run in runs] == [(step, step + 1) for step in range(6)]
    expected = SbevalForCausalLM.from_pretrained(whole)
    found = SbevalForCausalLM.from_pretrained(parts)
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=0, atol=0)

    assert found.config.training_length_tokens == CONTEXT_TOKENS
    assert found.config.extended_from["name"] == parent.name
    assert found.config.extended_from["training_length_tokens"] == 64
    if is_rope(parent):
        assert found.config.rope_parameters["rope_type"] == "dynamic"
        assert found.config.rope_parameters["original_max_position_embeddings"] == 64
    record = json.loads((parts / "training_record.json").read_text())
    assert record["tokens_seen"] == 6 * 512
    assert record["loss_curve"][-1]["loss_nats"] < record["loss_curve"][0]["loss_nats"]


def test_gradient_accumulation_changes_nothing(tmp_path, parent, data_folder):
    results = []
    for name, micro in (("one", 512), ("four", 128)):
        optimization = OptimizationSettings(
            learning_rate=3e-3, total_tokens=1024, batch_tokens=512, micro_batch_tokens=micro, warmup_steps=1
        )
        checkpointing = name == "four"
        extension = tiny_extension(parent, data_folder, optimization=optimization, gradient_checkpointing=checkpointing)
        results.append(SbevalForCausalLM.from_pretrained(extend(extension, tmp_path / name)).state_dict())
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=2e-2, atol=2e-4)


def test_text_files_serve_as_data(tmp_path, parent, source_texts):
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(source_texts):
        (tmp_path / "texts" / f"{index}.txt").write_text(text)
    one_step = OptimizationSettings(
        learning_rate=1e-3, total_tokens=256, batch_tokens=256, warmup_steps=0, schedule="extension"
    )
    checkpoint = extend(tiny_extension(parent, tmp_path / "texts", optimization=one_step), tmp_path / "run")
    assert json.loads((checkpoint / "training_record.json").read_text())["data"]["documents"] == len(
        [text for text in source_texts if text]
    )


@given(st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=3))
def test_segments_cover_every_input_once_and_begin_at_separators(rows):
    window_tokens = torch.tensor(rows)
    found = segments(window_tokens, separator=0)
    covered = [(row, place) for row, start, stop in found for place in range(start, stop)]
    assert sorted(covered) == [(row, place) for row in range(len(rows)) for place in range(8)]
    for row, start, stop in found:
        assert start == 0 or rows[row][start] == 0
        assert 0 not in rows[row][start + 1 : stop]


SCHEMES = {
    "stickbreaking": {},
    "stickbreaking with remainder and norm": {"remainder": "head_bias", "head_norm": True},
    "rope": {},
    "rope in a window": {"sliding_window": 40},
    "nope": {},
    "alibi": {},
    "fire": {},
}


def loss_and_gradients(model, loss) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_documents_have_the_loss_and_gradients_of_each_alone(scheme):
    model = tiny_model(scheme.split()[0], **SCHEMES[scheme])
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=draw) / max(1, weight.shape[-1] if weight.dim() else 1) ** 0.5
            )
    window_tokens = torch.randint(1, 300, (2, 201), generator=draw)
    window_tokens[0, [0, 70, 71, 150]] = 0
    window_tokens[1, 33] = 0
    alone = torch.zeros(())
    for row, start, stop in segments(window_tokens, 0):
        tokens = window_tokens[row : row + 1, start : stop + 1]
        alone = alone + next_token_loss(model, tokens) * (stop - start) / 400
    expected, expected_gradients = loss_and_gradients(model, alone)
    for whole in (DocumentMaskedLoss(separator=0)(model, window_tokens), bucketed_loss(model, window_tokens, 0)):
        found, gradients = loss_and_gradients(model, whole)
        assert found == pytest.approx(expected, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=2e-6)
    assert DocumentMaskedLoss(separator=299)(model, window_tokens).item() != pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("attention", ["stickbreaking", "rope", "nope"])
def test_documents_do_not_see_each_other(attention):
    model = tiny_model(attention)
    window_tokens = torch.randint(1, 300, (1, 201), generator=torch.Generator().manual_seed(1))
    window_tokens[0, [0, 70, 71, 150]] = 0
    begins = torch.tensor([0, 70, 71, 150, 200], dtype=torch.int32)
    changed = window_tokens.clone()
    changed[0, 1:70] = 5
    first, second = (
        model(input_ids=tokens[:, :200], cu_seqlens=begins, use_cache=False).logits
        for tokens in (window_tokens, changed)
    )
    assert torch.equal(first[:, 71:], second[:, 71:])
    assert not torch.equal(first[:, 2:70], second[:, 2:70])


def test_packed_texts_take_no_scaling_that_depends_on_a_length():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    model = tiny_model("rope", rope_parameters=scaling)
    inputs, begins = torch.ones(1, 100, dtype=torch.long), torch.tensor([0, 30, 100], dtype=torch.int32)
    with pytest.raises(UserError, match="held_rope_frequencies"):
        model(input_ids=inputs, cu_seqlens=begins, use_cache=False)
    with pytest.raises(ValueError, match="no attention_mask"):
        model(input_ids=inputs, cu_seqlens=begins, attention_mask=torch.ones_like(inputs))


def test_a_document_alone_has_the_ordinary_loss():
    model = tiny_model("stickbreaking")
    window_tokens = torch.randint(1, 300, (3, 65), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(DocumentMaskedLoss(0)(model, window_tokens), next_token_loss(model, window_tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 64}, "beyond the training length of 64"),
        ({"context_tokens": 100}, "whole windows of 100"),
        ({"documents": "packed"}, "separate, joined"),
        (
            {"optimization": OptimizationSettings(learning_rate=1e-3, total_tokens=2**22, batch_tokens=512)},
            r"epochs; .*--allow-repeat",
        ),
        (
            {
                "context_tokens": 2**18,
                "optimization": OptimizationSettings(
                    learning_rate=1e-3, total_tokens=2**18, batch_tokens=2**18, warmup_steps=0
                ),
            },
            "found the longest has",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(tmp_path, parent, data_folder, changes, message):
    with pytest.raises(UserError, match=message):
        extend(tiny_extension(parent, data_folder, **changes), tmp_path)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--context", "0"], "--context to be a whole number of at least 1, found 0"),
        (["--steps", "0"], "at least one step"),
        (["--warmup-steps", "9"], "within the run's 4 steps, found 9"),
        (["--learning-rate", "-1"], "learning_rate to be a number above 0"),
        (["--learning-rate", "nan"], "learning_rate to be a number above 0"),
        (["--log-every-steps", "0"], "--log-every-steps to be a whole number of at least 1, found 0"),
        (["--micro-batch-tokens", "0"], "micro_batch_tokens to be a whole number of at least 1, found 0"),
        (["--micro-batch-tokens", "384"], "multiple of the micro batch"),
        (["--context", "100000"], "whole windows of 100000 tokens.*multiples of --context"),
    ],
)
def test_numbers_that_make_no_run_are_refused_in_one_sentence(tmp_path, option, message):
    arguments = ["nowhere", "--data", "nowhere", "--out", str(tmp_path), "--context", "128", "--batch-tokens", "512"]
    with pytest.raises(UserError, match=message):
        extend_command([*arguments, "--steps", "4", "--warmup-steps", "1", *option])


def test_a_run_that_sees_one_window_twice_is_more_than_one_epoch(tmp_path, parent, source_texts):
    tokens = AutoTokenizer.from_pretrained(parent).encode("".join(source_texts), add_special_tokens=False)[
        : 5 * CONTEXT_TOKENS
    ]
    text = AutoTokenizer.from_pretrained(parent).decode(tokens)
    (tmp_path / "text.txt").write_text(text)
    optimization = OptimizationSettings(
        learning_rate=1e-3, total_tokens=5 * CONTEXT_TOKENS, batch_tokens=CONTEXT_TOKENS, warmup_steps=1
    )
    # an offset is drawn for every epoch: text of five windows has room for four
    with pytest.raises(UserError, match=r"that is 1\.25 epochs; .*--allow-repeat"):
        extend(tiny_extension(parent, tmp_path / "text.txt", optimization=optimization), tmp_path / "run")
    fewer = OptimizationSettings(
        learning_rate=1e-3, total_tokens=4 * CONTEXT_TOKENS, batch_tokens=CONTEXT_TOKENS, warmup_steps=1
    )
    checkpoint = extend(tiny_extension(parent, tmp_path / "text.txt", optimization=fewer), tmp_path / "run")
    assert json.loads((checkpoint / "training_record.json").read_text())["epochs"] == 1.0


def test_rope_scaling_needs_rope_and_arrays_need_the_same_tokenizer(tmp_path, parent, data_folder, source_texts):
    arguments = [str(parent), "--data", str(data_folder), "--context", "128", "--out", str(tmp_path)]
    arguments += ["--steps", "1", "--batch-tokens", "128", "--precision", "float32", "--warmup-steps", "0"]
    if not is_rope(parent):
        with pytest.raises(UserError, match=r"rotary|RoPE"):
            extend_command([*arguments, "--rope-scaling", "dynamic:4"])
    from sbeval.training.text.tokenizer import train_tokenizer

    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokens.npy", "recall.npy", "record.json"):
        (other / name).write_bytes((data_folder / name).read_bytes())
    save_tokenizer(train_tokenizer(source_texts, 290), other / "tokenizer")
    with pytest.raises(UserError, match="checkpoint's tokenizer"):
        extend_command([*arguments[:2], str(other), *arguments[3:]])


def test_a_transformers_model_is_extended_in_its_own_format(tmp_path, data_folder):
    save_tiny_llama(tmp_path / "llama", data_folder)
    checkpoint = extend(tiny_extension(tmp_path / "llama", data_folder, rope_scaling="dynamic:4"), tmp_path / "run")
    extended = load_checkpoint(checkpoint)
    assert extended.format == "huggingface:llama"
    assert extended.training_length_tokens == 64
    assert extended.model.config.max_position_embeddings == CONTEXT_TOKENS
    assert extended.model.config.rope_parameters["rope_type"] == "dynamic"
    assert extended.model.config.rope_parameters["factor"] == 4.0
    curve = json.loads((checkpoint / "training_record.json").read_text())["loss_curve"]
    assert curve[-1]["loss_nats"] < curve[0]["loss_nats"]


@pytest.mark.parametrize("pickled", [False, True])
def test_a_checkpoint_of_the_hub_is_extended_and_named_as_its_parent(tmp_path, data_folder, monkeypatch, pickled):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "hub" / "models--someone--llama"
    folder = place / "snapshots" / ("a" * 40)
    save_tiny_llama(folder, data_folder)
    if pickled:
        torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    checkpoint = extend(tiny_extension(place, data_folder).changed(checkpoint="someone/llama"), tmp_path / "run")
    parent = json.loads((checkpoint / "config.json").read_text())["extended_from"]
    assert parent["name"] == "someone/llama"
    assert parent["sha256"] == weights_sha256(folder)
    with pytest.raises(UserError, match="someone/other"):
        extend(tiny_extension(place, data_folder).changed(checkpoint="someone/other"), tmp_path / "other")


def test_scaled_frequencies_are_those_of_the_new_context_whatever_a_document_s_length(tmp_path, data_folder):
    folder = tmp_path / "parent"
    model = tiny_model("rope")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.dim() == 2:
                parameter.mul_(30)  # attention that depends on positions, and logits that depend on attention
    model.save_pretrained(folder)
    save_tokenizer(load_tokenizer(data_folder / "tokenizer" / "tokenizer.json"), folder)
    checkpoint = extend(tiny_extension(folder, data_folder, rope_scaling="dynamic:4"), tmp_path / "run")
    first = json.loads((checkpoint / "training_record.json").read_text())["loss_curve"][0]["loss_nats"]
    tokens = load_arrays(data_folder).tokens
    windows = TrainingWindows(
        tokens, tokens[:0].reshape(0, 0), length_tokens=CONTEXT_TOKENS, windows=24, recall_share=0.0, seed=0
    )
    batch = windows.__getitems__(range(4))
    loss = DocumentMaskedLoss(separator=0)
    with held_rope_frequencies(model, CONTEXT_TOKENS, parse_rope_scaling("dynamic:4"), original_length_tokens=64):
        pinned = loss(model, batch).item()
    assert first == pytest.approx(pinned, rel=1e-5)
    assert abs(first - pinned) < 0.1 * abs(first - loss(model, batch).item())


@pytest.fixture
def released(tmp_path, data_folder, monkeypatch):
    """A function that writes a checkpoint of a released layout, with the data's tokenizer beside it."""
    from tests.checkpoints import layouts, test_moduleformer

    monkeypatch.setattr(layouts, "VOCAB", 300)
    monkeypatch.setattr(test_moduleformer, "VOCAB", 300)
    layout = {
        "stickbreaking": lambda: layouts.dolomite(head_bias=True, head_norm=True, n_positions=64),
        "gpt_base rope": lambda: layouts.dolomite(model_type="gpt_base", mixer="softmax"),
        "fla": lambda: layouts.fla(qkv_bias=True, qk_norm=True, attend_current=False, kv_heads=None, tied=True),
        "moduleformer": lambda: test_moduleformer.checkpoint("mlp"),
    }

    def write(kind):
        torch.manual_seed(0)
        folder = layouts.save(tmp_path / kind.replace(" ", "_"), *layout[kind]())
        save_tokenizer(load_tokenizer(data_folder / "tokenizer" / "tokenizer.json"), folder)
        return folder

    return write


@pytest.mark.parametrize("kind", ["stickbreaking", "gpt_base rope", "fla"])
def test_released_layouts_are_extended_in_this_project_s_format(tmp_path, data_folder, released, kind):
    changes = {"rope_scaling": "dynamic:4"} if kind.endswith("rope") else {}
    checkpoint = extend(tiny_extension(released(kind), data_folder, **changes), tmp_path / "run")
    extended = load_checkpoint(checkpoint)
    assert extended.format == "sbeval"
    assert extended.training_length_tokens == CONTEXT_TOKENS
    if kind.endswith("rope"):
        assert extended.model.config.rope_parameters["original_max_position_embeddings"] == 64
    losses = [
        point["loss_nats"] for point in json.loads((checkpoint / "training_record.json").read_text())["loss_curve"]
    ]
    half = len(losses) // 2
    assert sum(losses[half:]) / len(losses[half:]) < sum(losses[:half]) / half


def test_a_model_that_cannot_be_saved_is_refused_before_any_training(tmp_path, data_folder, released):
    with pytest.raises(UserError, match="evaluation only"):
        extend(tiny_extension(released("moduleformer"), data_folder), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["this family", "llama"])
@pytest.mark.parametrize("scaling", ["linear:2", "dynamic:2", "yarn:2"])
def test_every_kind_of_scaling_is_trained_and_saved(tmp_path, data_folder, kind, scaling):
    if kind == "llama":
        save_tiny_llama(tmp_path / "parent", data_folder)
    else:
        tiny_model("rope").save_pretrained(tmp_path / "parent")
        save_tokenizer(load_tokenizer(data_folder / "tokenizer" / "tokenizer.json"), tmp_path / "parent")
    extended = extend(tiny_extension(tmp_path / "parent", data_folder, rope_scaling=scaling), tmp_path / "run")
    found = load_checkpoint(extended).model.config.rope_parameters
    assert found["rope_type"] == scaling.partition(":")[0]
    assert found["factor"] == 2.0
    assert found["original_max_position_embeddings"] == 64


def save_gpt2(folder, data_folder):
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(load_tokenizer(data_folder / "tokenizer" / "tokenizer.json"), folder)


def test_a_model_that_learned_its_positions_is_refused_before_anything_is_written(tmp_path, data_folder):
    save_gpt2(tmp_path / "gpt2", data_folder)
    with pytest.raises(UserError, match="positions for 128 tokens, found one that has learned 64"):
        extend(tiny_extension(tmp_path / "gpt2", data_folder), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_scaling_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, data_folder):
    save_tiny_llama(tmp_path / "llama", data_folder)
    scaling = '{"rope_type": "llama3", "factor": 4.0}'
    with pytest.raises(UserError, match="'llama3' needs the key"):
        extend(tiny_extension(tmp_path / "llama", data_folder, rope_scaling=scaling), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("parents", [torch.bfloat16, torch.float16, torch.float32])
def test_an_extension_is_saved_in_its_parent_s_type_or_in_float32_where_asked(
    tmp_path, data_folder, precision, parents
):
    save_tiny_llama(tmp_path / "llama", data_folder)
    LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=parents).save_pretrained(tmp_path / "llama")
    extended = extend(tiny_extension(tmp_path / "llama", data_folder, precision=precision), tmp_path / "run")
    saved = safetensors.torch.load_file(extended / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32 if precision == "float32" else parents}


def test_a_run_that_failed_before_its_first_state_does_not_block_its_folder(tmp_path, parent, data_folder):
    settled = tiny_extension(parent, data_folder)
    broken = settled.changed(
        optimization=settled.optimization.changed(learning_rate=1e30, gradient_clip=1e30, warmup_steps=1)
    )
    with pytest.raises(UserError, match=r"no state had been saved before: lower the learning rate and start again$"):
        extend(broken, tmp_path / "run")
    checkpoint = extend(settled, tmp_path / "run")
    record = json.loads((checkpoint / "training_record.json").read_text())
    assert record["extension"]["optimization"]["learning_rate"] == settled.optimization.learning_rate
    assert [point["step"] for point in record["loss_curve"]] == list(range(1, 7))
