import json

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from training_problems import (
    CONTEXT_TOKENS,
    assert_same_weights,
    copy_tokenizer,
    losses,
    parts_of,
    record_of,
    save_parent,
    save_tiny_llama,
    tiny_extension,
    tiny_model,
)  # fmt: skip
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from sbeval.checkpoints.load import load_checkpoint
from sbeval.errors import UserError
from sbeval.fingerprint.checkpoint import weights_sha256
from sbeval.inspection.description import describe
from sbeval.model_adapters.record import model_facts
from sbeval.models import SbevalForCausalLM
from sbeval.models.rope import setting_rope_frequencies
from sbeval.rope_parameters import parse_rope_scaling
from sbeval.training.arrays import load_arrays
from sbeval.training.command import extend_command
from sbeval.training.extend import extend
from sbeval.training.losses import bucketed_loss, document_loss, next_token_loss, segments
from sbeval.training.recipe import OptimizationSettings
from sbeval.training.tokenizer import save_tokenizer, train_tokenizer
from sbeval.training.windows import TrainingWindows
from tests.marks import exhaustive


def settings(total_tokens, batch_tokens, **changes):
    return OptimizationSettings(
        **{"learning_rate": 1e-3, "total_tokens": total_tokens, "batch_tokens": batch_tokens, "warmup_steps": 1}
        | changes
    )


@pytest.mark.parametrize("attention", ["rope", *exhaustive("stickbreaking")])
def test_extension_stopped_and_resumed_loses_and_repeats_no_step(tmp_path, data_folder, attention):
    parent = save_parent(tmp_path / "parent", data_folder, attention)
    changes = {"rope_scaling": "dynamic:4"} if attention == "rope" else {}
    extension = tiny_extension(parent, data_folder, **changes)
    whole, parts = extend(extension, tmp_path / "whole"), None
    while parts is None:
        parts = extend(extension, tmp_path / "parts", max_seconds=0.0)
    assert parts_of(tmp_path / "parts") == [(0, 1), (1, 2), (2, 3)]
    assert_same_weights(parts, whole)
    config = SbevalForCausalLM.from_pretrained(parts).config
    assert config.training_length_tokens == CONTEXT_TOKENS
    assert (config.extended_from["name"], config.extended_from["training_length_tokens"]) == ("parent", 64)
    if attention == "rope":
        assert config.rope_parameters["rope_type"] == "dynamic"
        assert config.rope_parameters["original_max_position_embeddings"] == 64
    assert record_of(parts)["tokens_seen"] == 3 * 512


@pytest.mark.exhaustive
def test_gradient_accumulation_changes_nothing(tmp_path, parent, data_folder):
    def trained(micro):
        optimization = settings(1024, 512, micro_batch_tokens=micro, learning_rate=3e-3)
        changes = {"optimization": optimization, "gradient_checkpointing": micro == 128}
        return extend(tiny_extension(parent, data_folder, **changes), tmp_path / str(micro))

    assert_same_weights(trained(128), trained(512), rtol=2e-2, atol=2e-4)


@given(st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=3))
def test_segments_cover_every_input_once_and_begin_at_separators(rows):
    found = segments(torch.tensor(rows), separator=0)
    covered = [(row, place) for row, start, stop in found for place in range(start, stop)]
    assert sorted(covered) == [(row, place) for row in range(len(rows)) for place in range(8)]
    for row, start, stop in found:
        assert start == 0 or rows[row][start] == 0
        assert 0 not in rows[row][start + 1 : stop]


SCHEMES = {
    **{attention: {} for attention in ("stickbreaking", "rope", "nope", "alibi", "fire")},
    "stickbreaking with remainder and norm": {"remainder": "head_bias", "head_norm": True},
    "rope in a window": {"sliding_window": 40},
    "forgetting with shifts": {"key_shift": True, "value_shift": True},
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
            width = weight.shape[-1] if weight.dim() else 1
            weight.add_(torch.randn(weight.shape, generator=draw) / width**0.5)
    window_tokens = torch.randint(1, 300, (2, 201), generator=draw)
    window_tokens[0, [0, 70, 71, 150]] = 0
    window_tokens[1, 33] = 0
    alone = torch.zeros(())
    for row, start, stop in segments(window_tokens, 0):
        alone = alone + next_token_loss(model, window_tokens[row : row + 1, start : stop + 1]) * (stop - start) / 400
    expected, expected_gradients = loss_and_gradients(model, alone)
    for whole in (document_loss(model, window_tokens, 0), bucketed_loss(model, window_tokens, 0)):
        found, gradients = loss_and_gradients(model, whole)
        assert found == pytest.approx(expected, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=2e-6)
    assert document_loss(model, window_tokens, 299).item() != pytest.approx(expected, rel=1e-5)


def test_packed_texts_take_no_scaling_that_depends_on_a_length():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    model = tiny_model("rope", rope_parameters=scaling)
    inputs, begins = torch.ones(1, 100, dtype=torch.long), torch.tensor([0, 30, 100], dtype=torch.int32)
    with pytest.raises(UserError, match="setting_rope_frequencies"):
        model(input_ids=inputs, cu_seqlens=begins, use_cache=False)
    with pytest.raises(ValueError, match="no attention_mask"):
        model(input_ids=inputs, cu_seqlens=begins, attention_mask=torch.ones_like(inputs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 64}, "exceed the training length of 64"),
        ({"context_tokens": 100}, "multiples of --context 100"),
        ({"documents": "packed"}, "separate, joined"),
        ({"optimization": settings(2**22, 512)}, r"times; .*--batch-tokens.*--allow-repeat"),
        ({"context_tokens": 2**18, "optimization": settings(2**18, 2**18, warmup_steps=0)}, "the longest has"),
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
        (["--warmup-steps", "9"], "at most 4 warm-up steps, .* found 9"),
        (["--learning-rate", "-1"], "learning_rate to be a number above 0"),
        (["--learning-rate", "nan"], "learning_rate to be a number above 0"),
        (["--log-every-steps", "0"], "--log-every-steps to be a whole number of at least 1, found 0"),
        (["--micro-batch-tokens", "0"], "micro_batch_tokens to be a whole number of at least 1, found 0"),
        (["--micro-batch-tokens", "384"], "multiple of micro_batch_tokens"),
        (["--context", "100000"], "multiples of --context 100000, found"),
    ],
)
def test_numbers_that_make_no_run_are_refused_in_one_sentence(tmp_path, option, message):
    arguments = ["nowhere", "--data", "nowhere", "--out", str(tmp_path), "--context", "128", "--batch-tokens", "512"]
    with pytest.raises(UserError, match=message):
        extend_command([*arguments, "--steps", "4", "--warmup-steps", "1", *option])


@pytest.mark.exhaustive
def test_a_run_that_sees_one_window_twice_is_more_than_one_epoch(tmp_path, parent, source_texts):
    tokenizer = AutoTokenizer.from_pretrained(parent)
    tokens = tokenizer.encode("".join(source_texts), add_special_tokens=False)[: 5 * CONTEXT_TOKENS]
    (tmp_path / "text.txt").write_text(tokenizer.decode(tokens))
    five, four = (settings(windows * CONTEXT_TOKENS, CONTEXT_TOKENS) for windows in (5, 4))
    # an offset is drawn for every epoch: text of five windows has room for four
    with pytest.raises(UserError, match=r"1\.25 times; .*--batch-tokens, or --allow-repeat"):
        extend(tiny_extension(parent, tmp_path / "text.txt", optimization=five), tmp_path / "run")
    record = record_of(extend(tiny_extension(parent, tmp_path / "text.txt", optimization=four), tmp_path / "run"))
    assert (record["epochs"], record["data"]["documents"]) == (1.0, 1)


def test_rope_scaling_needs_rope_and_arrays_need_the_same_tokenizer(tmp_path, parent, data_folder, source_texts):
    arguments = [str(parent), "--data", str(data_folder), "--context", "128", "--out", str(tmp_path)]
    arguments += ["--steps", "1", "--batch-tokens", "128", "--precision", "float32", "--warmup-steps", "0"]
    with pytest.raises(UserError, match=r"rotary|RoPE"):
        extend_command([*arguments, "--rope-scaling", "dynamic:4"])
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokens.npy", "recall.npy", "record.json"):
        (other / name).write_bytes((data_folder / name).read_bytes())
    save_tokenizer(train_tokenizer(source_texts, 290), other / "tokenizer")
    with pytest.raises(UserError, match="checkpoint's tokenizer"):
        extend_command([*arguments[:2], str(other), *arguments[3:]])


@pytest.mark.parametrize("pickled", [True, *exhaustive(False)])
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
    assert (parent["name"], parent["sha256"]) == ("someone/llama", weights_sha256(folder))
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
    copy_tokenizer(data_folder, folder)
    checkpoint = extend(tiny_extension(folder, data_folder, rope_scaling="dynamic:4"), tmp_path / "run")
    first = record_of(checkpoint)["loss_curve"][0]["loss_nats"]
    tokens = load_arrays(data_folder).tokens
    options = {"length_tokens": CONTEXT_TOKENS, "windows": 24, "recall_share": 0.0, "seed": 0}
    batch = TrainingWindows(tokens, tokens[:0].reshape(0, 0), **options).__getitems__(range(4))
    with setting_rope_frequencies(model, CONTEXT_TOKENS, parse_rope_scaling("dynamic:4"), original_length_tokens=64):
        pinned = document_loss(model, batch, 0).item()
    assert first == pytest.approx(pinned, rel=1e-5)
    assert abs(first - pinned) < 0.1 * abs(first - document_loss(model, batch, 0).item())


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
        copy_tokenizer(data_folder, folder)
        return folder

    return write


@pytest.mark.parametrize("kind", ["stickbreaking", *exhaustive("gpt_base rope", "fla")])
def test_released_layouts_are_extended_in_this_project_s_format(tmp_path, data_folder, released, kind):
    changes = {"rope_scaling": "dynamic:4"} if kind.endswith("rope") else {}
    checkpoint = extend(tiny_extension(released(kind), data_folder, steps=6, **changes), tmp_path / "run")
    extended = load_checkpoint(checkpoint)
    assert (extended.format, extended.training_length_tokens) == ("sbeval", CONTEXT_TOKENS)
    if kind.endswith("rope"):
        assert extended.model.config.rope_parameters["original_max_position_embeddings"] == 64
    curve = losses(tmp_path / "run")
    assert sum(curve[3:]) < sum(curve[:3])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("moduleformer", {}, "can only be evaluated"),
        ("gpt2", {}, "64 learned position embeddings and cannot read 128 tokens"),
        ("llama", {"rope_scaling": '{"rope_type": "llama3", "factor": 4.0}'}, "'llama3' needs the key"),
    ],
)
def test_what_does_not_fit_is_refused_before_writing(tmp_path, data_folder, released, kind, changes, message):
    if kind == "moduleformer":
        folder = released(kind)
    elif kind == "llama":
        save_tiny_llama(folder := tmp_path / kind, data_folder)
    else:
        config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=0)
        GPT2LMHeadModel(config).save_pretrained(folder := tmp_path / kind)
        copy_tokenizer(data_folder, folder)
    with pytest.raises(UserError, match=message):
        extend(tiny_extension(folder, data_folder, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["this family", "llama"])
@pytest.mark.parametrize("scaling", ["yarn:2", *exhaustive("dynamic:2", "linear:2")])
def test_every_kind_of_scaling_is_trained_and_saved(tmp_path, data_folder, kind, scaling):
    if kind == "llama":
        save_tiny_llama(tmp_path / "parent", data_folder)
    else:
        save_parent(tmp_path / "parent", data_folder, "rope")
    extended = extend(tiny_extension(tmp_path / "parent", data_folder, rope_scaling=scaling), tmp_path / "run")
    checkpoint = load_checkpoint(extended)
    assert checkpoint.format == ("huggingface:llama" if kind == "llama" else "sbeval")
    assert checkpoint.training_length_tokens == CONTEXT_TOKENS
    assert checkpoint.model.config.max_position_embeddings == CONTEXT_TOKENS
    found = checkpoint.model.config.rope_parameters
    assert (found["rope_type"], found["factor"]) == (scaling.partition(":")[0], 2.0)
    assert found["original_max_position_embeddings"] == 64


def test_the_text_configuration_of_a_multimodal_checkpoint_is_extended(tmp_path, data_folder):
    copy_tokenizer(data_folder, tmp_path / "parent")
    text = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "parent")
    extension = tiny_extension(tmp_path / "parent", data_folder, rope_scaling="linear:2")
    checkpoint = load_checkpoint(extended := extend(extension, tmp_path / "run"))
    assert checkpoint.extended_from is not None
    assert (checkpoint.training_length_tokens, checkpoint.extended_from["name"]) == (CONTEXT_TOKENS, "parent")
    assert checkpoint.model.config.text_config.rope_parameters["full_attention"]["factor"] == 2.0
    assert describe(extended).extended_from == checkpoint.extended_from
    facts = model_facts(checkpoint.model.config, str(extended), checkpoint.model)
    assert facts["extended_from"] == checkpoint.extended_from


@pytest.mark.parametrize(
    ("precision", "parents"),
    [("bfloat16", torch.float16), *exhaustive(("bfloat16", torch.float32), ("float32", torch.bfloat16))],
    ids=str,
)
def test_an_extension_is_saved_in_its_parent_s_type_or_float32_where_asked(tmp_path, data_folder, precision, parents):
    save_tiny_llama(tmp_path / "llama", data_folder)
    LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=parents).save_pretrained(tmp_path / "llama")
    extended = extend(tiny_extension(tmp_path / "llama", data_folder, precision=precision), tmp_path / "run")
    saved = safetensors.torch.load_file(extended / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32 if precision == "float32" else parents}


def test_a_run_that_failed_before_its_first_state_does_not_block_its_folder(tmp_path, parent, data_folder):
    settled = tiny_extension(parent, data_folder)
    steep = settled.optimization.changed(learning_rate=1e30, gradient_clip=1e30, warmup_steps=1)
    broken = settled.changed(optimization=steep)
    with pytest.raises(UserError, match=r"no state had been saved before: lower the learning rate and start again$"):
        extend(broken, tmp_path / "run")
    record = record_of(extend(settled, tmp_path / "run"))
    assert record["extension"]["optimization"]["learning_rate"] == settled.optimization.learning_rate
    assert [point["step"] for point in record["loss_curve"]] == [1, 2, 3]


def no_gpu_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def no_host_memory(*_, **__):
    return torch.empty(2**50)


@pytest.mark.parametrize("fail", exhaustive(no_gpu_memory, no_host_memory))
def test_memory_that_runs_out_is_one_sentence_with_what_to_lower(tmp_path, parent, data_folder, monkeypatch, fail):
    monkeypatch.setattr("sbeval.training.extend.document_loss", fail)
    options = ["--data", str(data_folder), "--context", "128", "--steps", "3", "--batch-tokens", "512"]
    options += ["--learning-rate", "1e-3", "--out", str(tmp_path / "run"), "--precision", "float32"]
    for more, lowered in (
        (["--micro-batch-tokens", "512"], "512 tokens.*: lower --micro-batch-tokens to 128, add --gradient-checkpoint"),
        (["--gradient-checkpointing"], r"128 tokens.*\): use --fsdp or --context-parallel .* or lower --context, and "),
    ):
        with pytest.raises(UserError, match=rf"Expected memory for .* a pass of {lowered}.*start again\.$"):
            extend_command([str(parent), *options, *more])
    monkeypatch.undo()
    extend_command([str(parent), *options])  # nothing that was left is in the way
