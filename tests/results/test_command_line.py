import pytest

from sbeval.results.records import recorded_command


def test_a_console_script_is_named_without_its_folder_and_arguments_can_be_pasted_into_a_shell() -> None:
    arguments = ["/usr/bin/lm_eval", "--model_args", "pretrained=my models/x,max_batch_tokens=4096", "--tasks", "a,b"]
    assert recorded_command(arguments) == (
        "lm_eval --model_args 'pretrained=my models/x,max_batch_tokens=4096' --tasks a,b"
    )


def test_a_module_is_named_as_python_runs_it() -> None:
    assert recorded_command(["/lib/lm_eval/__main__.py", "--limit", "3"]) == "python -m lm_eval --limit 3"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model_args", "pretrained=x,token=SECRET,dtype=float32"],
        ["--hf_hub_log_args", "hub_repo=y,token=SECRET"],
        ["--hf-token", "SECRET"],
        ["--hf_token=SECRET"],
        ["--model_args", '{"pretrained": "x", "token": "SECRET"}'],
    ],
)
def test_secrets_are_not_kept(arguments: list[str]) -> None:
    command = recorded_command(["lm_eval", *arguments])
    assert "SECRET" not in command
    assert "***" in command


@pytest.mark.parametrize("argument", ["max_batch_tokens=64", "eos_token=</s>", "token_count=3", "monkey=1"])
def test_what_only_sounds_like_a_secret_is_kept(argument: str) -> None:
    assert argument.replace("</s>", "") in recorded_command(["lm_eval", argument]).replace("</s>", "")
