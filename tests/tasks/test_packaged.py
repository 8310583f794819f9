"""What the packaged YAML files say agrees with lm-eval's own reading and with the classes they name."""

import importlib
import os
from pathlib import Path
from typing import get_type_hints

import pytest
from fresh_process import run_code
from lm_eval.api.registry import get_model
from lm_eval.api.task import ConfigurableTask
from source_tree import layer, modules

from sbeval.errors import UserError
from sbeval.tasks.base import BaseTask
from sbeval.tasks.packaged import are_all_here, check_model, check_names, definitions, expand_names, is_group
from sbeval.tasks.recall.options import SpanOptions
from sbeval.tasks.user_options import TASK_CLASSES, options_classes, task_class


def test_the_files_are_read_as_lm_eval_reads_them() -> None:
    from lm_eval.tasks import TaskManager

    index = TaskManager(include_path=str(Path(__file__).parents[2] / "tasks"), include_defaults=False)
    assert set(definitions()) == set(index.all_groups) | set(index.all_subtasks)
    for name, settings in definitions().items():
        theirs = index.task_index[name].cfg or {}
        assert is_group(settings) == (name in index.all_groups)
        assert {key: theirs.get(key) for key in ("task", "metadata", "output_type")} == {
            key: settings.get(key) for key in ("task", "metadata", "output_type")
        }


def test_what_a_file_says_is_generated_and_which_options_are_read_early_are_its_class_s() -> None:
    for name, settings in definitions().items():
        if "class" not in settings:
            continue
        kind = task_class(settings["class"])
        if not is_group(settings):
            assert kind.fixed["output_type"] == settings.get("output_type", "loglikelihood_rolling"), name
        # a class without a line in the table would be missing in the help
        assert kind.options_class in options_classes(), name
        assert issubclass(kind.options_class, get_type_hints(kind).get("options", SpanOptions)), name


def test_options_are_checked_without_torch() -> None:
    classes = sorted(
        {*TASK_CLASSES, *(settings["class"] for settings in definitions().values() if "class" in settings)}
    )
    code = f"import sys\nfrom sbeval.tasks.user_options import task_class\nfor path in {classes}: task_class(path)\n"
    assert run_code(f"{code}print({{'torch', 'transformers'}} & {{*sys.modules}})") == ["set()"]


def test_keys_that_a_run_s_tasks_read_are_checked_without_importing_other_tasks() -> None:
    code = """
import sys
from sbeval.errors import UserError
from sbeval.tasks.user_options import TASK_CLASSES, check_keys
modules = {path.rpartition(".")[0] for path in TASK_CLASSES}
print(*modules & {*sys.modules})
check_keys(["sb_copy", "sb_copy_phrase"], ["context_lengths", "num_samples"])
print(*sorted(modules & {*sys.modules}))
try:
    check_keys(["sb_copy"], ["context_lenghts"])
except UserError as error:
    print(error)
print(modules <= {*sys.modules})
"""
    before, after, error, all_imported = run_code(code)
    assert before == ""
    assert after == "sbeval.tasks.recall.copying"
    assert "context_lenghts" in error
    assert all_imported == "True"


def test_only_the_base_derives_from_lm_eval_s_own_class() -> None:
    for name in modules():
        if layer(name) == "tasks":
            importlib.import_module(name)
    ours = [kind for kind in ConfigurableTask.__subclasses__() if kind.__module__.startswith("sbeval.")]
    assert ours == [BaseTask]


def test_groups_and_patterns_stand_for_their_tasks_and_patterns_of_another_prefix_may_be_lm_evals_too() -> None:
    suite = dict(expand_names(["sb_paper_nlp"]))
    assert (suite["hellaswag"], suite["sb_paper_wikitext"]) == (None, definitions()["sb_paper_wikitext"])
    assert {"sb_niah_single_1", "sb_niah_single_1_forced"} <= dict(expand_names(["sb_niah_single_*"])).keys()
    assert not any(are_all_here([name]) for name in ("sb_paper_nlp", "*niah_single_1"))
    assert are_all_here(["sb_paper_length", "sb_ruler", "sb_niah_single_*"])


def test_a_task_of_a_given_folder_needs_none_of_lm_evals_and_a_group_there_may(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\nprocess_docs: !function utils.shuffled\n")
    (tmp_path / "several.yaml").write_text("group: several\ntask: [mine, hellaswag]\n")
    (tmp_path / "cut.yaml").write_text("task: cut\ntag: [")
    assert are_all_here(["mine", "sb_ruler"], [tmp_path])
    assert not are_all_here(["mine"])
    assert not any(are_all_here([name], [tmp_path]) for name in ("several", "hellaswag", "cut", "min"))


@pytest.mark.parametrize(
    "name", ["hellaswag", "sb_ruler", "sb_niah*", "some/task.yaml", "mmlu_anatomy", "arc_multilingual", "mafand_tasks"]
)
def test_names_that_are_somewhere_pass(name: str) -> None:
    check_names([name])


def test_a_name_of_a_folder_that_is_included_passes(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: sb_of_my_own\n")
    check_names(["sb_of_my_own"], [tmp_path])
    with pytest.raises(UserError, match=r"There is no task 'sb_of_my_own'"):
        check_names(["sb_of_my_own"])


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("sb_niah_singel_1", "sb_niah_single_1"), ("helaswag", "hellaswag"), ("wikitex", "wikitext"), ("sb_none", "sb_")],
)
def test_a_name_that_is_nowhere_is_answered_with_those_near_it(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"There is no task '{wrong}': try .*{near}"):
        check_names(["hellaswag", wrong])


@pytest.mark.parametrize(
    ("tasks", "model", "reason"),
    [
        (["sb_stdlib_stream", "sb_span"], "vllm", "sb_span .*vllm, which does not expose its attention weights"),
        (["sb_niah_forced"], "local-chat-completions", "sb_niah_single_1_forced, .* gives no log-probabilities of a"),
        (["sb_paper_nlp"], "gguf", "sb_paper_wikitext .*gguf, which gives no log-probabilities of a text"),
        (["sb_wikitext_rolling"], object(), "sb_wikitext_rolling .*object, which gives no log-probabilities"),
    ],
    ids=["spans", "chats", "no tokens", "no model"],
)
def test_tasks_that_a_model_cannot_answer_are_refused(tasks: list[str], model: object, reason: str) -> None:
    check_model("sb", tasks)
    with pytest.raises(UserError, match=f"^{reason}.*: use --model sb"):
        check_model(model, tasks, get_model)


@pytest.mark.parametrize("model", ["hf", "vllm", "local-completions", "openai-completions"])
def test_tasks_that_generate_are_every_models_and_others_those_of_all_that_score_tokens(model: str) -> None:
    check_model(model, ["sb_wikitext", "sb_copy", "sb_mqrar", "sb_paper_length"], get_model)
    check_model(model, ["sb_ruler", "sb_niah_single_1", "sb_json_kv", "hellaswag"])
    check_model(model, ["sb_paper_mmlu", "sb_paper_gsm8k", "sb_paper_ruler", "sb_paper_appendix"])


def test_a_folder_of_tasks_may_hold_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone.yaml").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="There is no task 'sb_nope'"):
        check_names(["sb_nope"], [tmp_path])
