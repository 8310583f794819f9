"""Corpora are checked by name before anything else, and the check knows every task that needs one."""

import sys
from pathlib import Path

import pytest
from fresh_process import run
from ruler_problems import TASKS

from sbeval.errors import UserError
from sbeval.tasks.ruler.texts import OFFLINE_TASKS
from sbeval.tasks.user_options import check_keys, check_options
from tests.marks import exhaustive

SBEVAL = Path(sys.executable).with_name("sbeval")
OFFLINE = set(OFFLINE_TASKS.replace(" and ", ", ").split(", "))


@pytest.fixture
def offline(tmp_path) -> dict[str, str]:
    """Environment of a process that reaches no network and has nothing on disk."""
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    folders = {name: str(tmp_path / name) for name in ("HF_HOME", "SBEVAL_CACHE")}
    return {**nowhere, **folders, "HF_HUB_OFFLINE": "1", "no_proxy": ""}


def test_given_corpora_pass(corpora):
    check_options(["sb_ruler", "sb_niah_forced", "sb_paper_ruler", "hellaswag"], corpora)


@pytest.mark.parametrize(
    ("task", "missing"),
    [
        *((task, "essays") for task in ("sb_niah", "sb_niah_forced", "sb_niah_s*")),
        ("sb_ruler", "hotpot"),
        ("sb_paper_ruler", "squad"),
        ("sb_ruler_qa_squad", "squad"),
    ],
)
def test_a_place_without_them_is_named(corpora, task, missing):
    with pytest.raises(UserError, match="/no/such/place"):
        check_options([task], {**corpora, missing: "/no/such/place"})


def test_options_that_change_what_is_needed_count(corpora):
    nowhere = {"essays": "/no/such/place"}
    check_options(["sb_niah_single_2"], {**nowhere, "type_haystack": "noise"})
    own = {"sb_niah_single_2": {"essays": corpora["essays"]}, "type_haystack": "needle"}
    check_options(["sb_niah"], {**nowhere, **own})
    with pytest.raises(UserError, match="/no/such/place"):
        check_options(["sb_ruler_vt"], {**nowhere, "sb_ruler_vt": {"type_haystack": "essay"}})
    with pytest.raises(UserError, match="keys that sb_ruler_vt has, found unknown key 'needles'"):
        check_options(["sb_ruler_vt"], {"sb_ruler_vt": {"needles": 1}})


def test_keys_that_no_packaged_task_reads_are_refused_where_no_other_is_asked_for():
    for key, hint in (
        ("lengths", "did you mean 'context_lengths'"),
        ("context_length", "did you mean"),
        ("zz", "known"),
    ):
        with pytest.raises(UserError, match=f"keys that a packaged task has, found unknown key '{key}' .*{hint}"):
            check_keys(["sb_stdlib", "sb_ruler"], [key])
        check_keys(["sb_stdlib", "hellaswag"], [key])
    check_keys(["sb_s*"], ["context_lengths", "essays", "sb_stdlib_rolling"])


def test_tasks_without_corpora_are_those_the_message_names():
    check_options(OFFLINE, {"essays": "/no/such/place", "squad": "/no/such/place", "hotpot": "/no/such/place"})
    for name in set(TASKS) - OFFLINE:
        with pytest.raises(UserError, match="/no/such/place"):
            check_options([name], dict.fromkeys(("essays", "squad", "hotpot"), "/no/such/place"))


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        *exhaustive(("sb_ruler_qa_squad", '"squad": "FILE"')),
        ("sb_ruler", '"essays": "DIR", "squad": "FILE", "hotpot": "FILE"'),
    ],
)
def test_the_command_says_so_in_one_sentence_before_it_loads_a_model(asked, keys, tmp_path, offline):
    process = run([SBEVAL, "run", "--tasks", asked, "--model_args", "pretrained=no-such-model"], environment=offline)
    assert process.returncode == 1
    (sentence,) = process.stderr.splitlines()
    assert "sb_ruler_qa_squad" in sentence
    assert f"--metadata '{{{keys}}}'" in sentence
    assert f"or run {OFFLINE_TASKS}, which need no text." in sentence
