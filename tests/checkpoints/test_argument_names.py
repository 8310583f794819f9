"""A name is refused without the model only where no source that reads arguments holds it."""

import inspect
import json
from pathlib import Path

import huggingface_hub
import pytest
import transformers
from lm_eval.models.huggingface import HFLM

from sbeval.checkpoints.argument_names import harness_arguments, names_of_a_checkpoint
from sbeval.errors import UserError
from sbeval.hub_names import is_on_the_hub
from sbeval.model_adapters.open.arguments import check_early, check_names
from sbeval.models import SbevalConfig, SbevalForCausalLM

READ_BY_LOADING = (
    *("attn_implementation", "torch_dtype", "low_cpu_mem_usage", "quantization_config", "device_map", "variant"),
    *("use_safetensors", "local_files_only", "code_revision", "output_loading_info", "experts_implementation"),
)


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(request.param))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_the_harness_s_arguments_are_those_of_its_signature() -> None:
    assert harness_arguments() == set(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "qwen3_moe", "mamba", "t5"])
def test_every_argument_of_a_configuration_is_known(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    config = transformers.CONFIG_MAPPING[kind]
    names = names_of_a_checkpoint(tmp_path)
    assert names is not None
    assert set(config().to_dict()) | set(inspect.signature(config.__init__).parameters) - {"args"} <= names | {"kwargs"}
    assert names.issuperset(READ_BY_LOADING)


@pytest.mark.parametrize("revision", [None, "b"])
def test_names_of_a_checkpoint_of_the_hub_are_those_of_its_cached_configuration(
    revision: str | None, tmp_path: Path
) -> None:
    repository = tmp_path / "models--owner--name"
    (snapshot := repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (refs := repository / "refs").mkdir()
    (refs / (revision or "main")).write_text("0" * 40)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    arguments = {"pretrained": "owner/name", "cache_dir": str(tmp_path)} | ({"revision": revision} if revision else {})
    check_names(arguments | {"rope_theta": 8})
    with pytest.raises(UserError, match="no_such, which neither"):
        check_names(arguments | {"no_such": 8})


def test_every_argument_of_this_family_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "sbeval"}')
    assert set(SbevalConfig().to_dict()) <= (names_of_a_checkpoint(tmp_path) or set())


def test_a_name_in_the_code_of_this_family_is_no_argument(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "sbeval"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    name = SbevalForCausalLM.head_logits.__name__
    with pytest.raises(UserError, match=f"contains {name}, which neither"):
        check_early({"pretrained": str(tmp_path), name: 1})
    check_early({"pretrained": str(tmp_path), "logits_divisor": 2.0})


@pytest.mark.parametrize(
    "checkpoint",
    [
        {"model_type": "of_its_own"},
        {"model_type": "llama", "auto_map": {"AutoConfig": "a.B"}},
        {},
        {"model_type": "../x"},
    ],
    ids=str,
    indirect=True,
)
def test_of_a_model_whose_code_is_elsewhere_no_name_is_refused(checkpoint: Path) -> None:
    assert names_of_a_checkpoint(checkpoint) is None
    check_early({"pretrained": str(checkpoint), "of_that_code": 1})


def test_a_private_repository_is_asked_for_with_the_model_s_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def metadata(address: str, *, token: str | None = None, timeout: float) -> None:
        sent.append((address.endswith("nobody/private/resolve/main/config.json"), token))

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    assert is_on_the_hub("nobody/private", {"token": "hf_secret"})
    assert is_on_the_hub("nobody/private")
    assert sent == [(True, "hf_secret"), (True, None)]
