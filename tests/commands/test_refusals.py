"""What cannot run is refused in one sentence before torch is imported, whatever the command."""

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run
from source_tree import ROOT

from sbeval.errors import UserError
from sbeval.harness.options import option_errors_explained
from tests.marks import exhaustive

CHECKPOINT = ROOT / "sbeval" / "demo" / "checkpoints" / "rope"
RUN = "run --model_args pretrained=x --tasks"
LOADED = f"run --model_args pretrained={CHECKPOINT} --tasks"
SENTENCES = {
    f"{RUN} sb_stdlib_steam": "There is no task 'sb_stdlib_steam'",
    f"{RUN} helaswag": "There is no task 'helaswag'",
    "run --tasks sb_stdlib --model_args pretrained=/no/such": "there is no such folder: /no/such",
    "run --tasks sb_stdlib --model_args pretrained=models/typo": "there is no such folder: models/typo",
    "run --tasks sb_stdlib --model_args pretrained=x,dtype=bfloat61": "found 'bfloat61'",
    "run --tasks sb_stdlib --model_args pretrained=x,max_length=a": "Expected max_length",
    "run --tasks sb_stdlib --model_args pretrained=x,backend=cpu": "Expected backend to be one of default, causal",
    "run --tasks sb_stdlib --model_args pretrained=x,subfolder=True": "Expected subfolder to be the name of a folder",
    "run --tasks sb_stdlib --model_args pretrained=trained,subfolder=1000": "beside the model in trained/1000",
    "run --tasks sb_stdlib --model_args pretrained=x,revision=[1]": "Expected revision to be a branch, a tag",
    "run --tasks sb_stdlib --model_args pretrained=x,max_lenght=64": "Expected max_length in --model_args",
    f"run --tasks sb_stdlib --model_args pretrained={CHECKPOINT},revison=main": "Expected revision in --model_args",
    f"run --tasks sb_stdlib --model_args pretrained={CHECKPOINT},label=x": "contains label, which neither",
    f"run --tasks sb_stdlib --model_args pretrained={CHECKPOINT},no_such=8": "contains no_such, which neither",
    f"{RUN} sb_stdlib": "pretrained=x, but x is no folder here, and neither the hub nor its cache on this machine has",
    f"run --tasks sb_stdlib --model hf --model_args pretrained={CHECKPOINT},label=x": "label, which neither lm-eval",
    "run --tasks sb_stdlib --model hf --model_args pretrained=x,max_lenght=64": "length in --model_args, found",
    "run --tasks sb_stdlib --model vllm --model_args pretrained=x,max_lenght=64": "length in --model_args, found",
    f"{RUN} sb_stdlib --model vllm --metadata max_lenght=64": "max_length in --metadata, found max_lenght",
    "run --tasks sb_stdlib --model_args pretrained=x,device=cpu": "pass --device instead",
    "run --tasks sb_stdlib --model_args pretrained=x,batch_size=4": "pass --batch_size instead",
    "run --tasks sb_stdlib --model local-completions --model_args model=x,batch_size=4": "pass --batch_size instead",
    "run --tasks sb_stdlib --model local-completions --model_args model=x,device=cpu": "pass --device instead",
    "run --tasks sb_stdlib --model_args pretrained=x,rope_scaling=dynamc:4": "got 'dynamc:4'",
    "run --tasks sb_stdlib --model_args pretraned=x": "found pretraned",
    "run --tasks sb_stdlib": "Expected pretrained=CHECKPOINT in --model_args, found none",
    "run --model_args pretrained=x": "--tasks names no task",
    f"{RUN} sb_stdlib --metadata context_lengths=[-5]": "found [-5]",
    f"{RUN} sb_stdlib --metadata data_path=/no/such": "Expected text at data_path",
    **{
        f"{RUN} sb_stdlib {option} {{context_lengths:[8]}}": f"lm-eval rejected the value of {option} (Invalid JSON"
        for option in ("--metadata", "--gen_kwargs", "--wandb_args", "--model_args", "-a")
    },
    f'{RUN} sb_stdlib --metadata {{"context_length":[8]}}': "expected context_lengths in --metadata",
    f'{RUN} sb_span --metadata {{"num_sample":8}}': "expected num_samples in --metadata",
    f'{RUN} sb_span --metadata {{"context_lengths":[1,64]}}': "context_lengths of sb_span to be a list of at least 2",
    f'{RUN} sb_copy --metadata {{"sb_copy_phrase":{{"phrase":2}}}}': "found unknown key 'phrase'",
    f"{RUN} sb_ruler_fwe --metadata alpha=0": "Expected alpha of sb_ruler_fwe to be a number above 1",
    f"{RUN} sb_text": "sb_text_rolling: Expected a text to read, found none",
    f"{RUN} sb_wikitext --metadata split=paragraph": "The documents of wikitext are its pages and cannot be split",
    f"{RUN} sb_stdlib --include_path nope": "--include_path names nope, which is no folder",
    f"{RUN} sb_niah --metadata context_lengths=1000000000": "none above 134217728",
    f"{RUN} sb_flipflop --metadata num_samples=1000000000": "at most 1048576, found 1000000000",
    f"{RUN} sb_ruler_vt --metadata num_hops=1000000": "num_hops of sb_ruler_vt to be at most its longest context",
    f"{RUN} sb_niah --metadata depths=1000000000": "Expected depths",
    f"{RUN} sb_stdlib --limit -3": "Expected --limit to be a whole number of documents",
    f"{RUN} sb_stdlib --limit 1e22": "Expected --limit to be a whole number of documents",
    f"{RUN} sb_stdlib --limit 1.5": "or a share of them between 0 and 1, found 1.5",
    f'{RUN} sb_stdlib --limit 2 --samples {{"sb_stdlib":[1]}}': "--samples and --limit exclude each other",
    f'{RUN} sb_stdlib --samples {{"sb_stdlib":"x"}}': "Expected --samples of sb_stdlib to be a list of whole numbers",
    f"{RUN} sb_stdlib --samples ~/nope": "a mapping of tasks to samples (--samples) at '~/nope'",
    f"{RUN} sb_stdlib --samples nope": "a mapping of tasks to samples (--samples)",
    "run --tasks sb_stdlib --model_args pretrained=x,max_batch_size=4": "pass --max_batch_size instead",
    "run --tasks sb_stdlib --model_args pretrained=x,parallelize=7": "to be true or false, found 7",
    "run --tasks sb_stdlib --model_args pretrained=x,attn_implementation=7": "to be a valid string, found 7",
    f"{RUN} sb_stdlib --seed -1": "Expected a seed for numpy from 0 to 4294967295, found -1",
    f"{RUN} sb_stdlib --seed 0,99999999999,2,3": "found 99999999999",
    f"{RUN} sb_stdlib --seed 0,1,99999999999999999999,2": "Expected a seed for torch",
    f"{RUN} sb_stdlib --seed 0,1,-1,3 --verbosity loud": "Expected --verbosity",
    f"{RUN} sb_stdlib --verbosity loud": "Expected --verbosity such as INFO or ERROR, found 'LOUD'",
    f"{RUN} sb_stdlib --check_integrity": "--check_integrity runs the tests of lm-eval's source tree",
    f"{RUN} sb_stdlib --config negative.yaml": "Expected a seed for numpy from 0 to 4294967295, found -1",
    "run --config essays.yaml": "Expected essays as a .txt file or a folder of them at /no/such/place",
    f"{RUN} sb_stdlib --lmit 3": "unrecognized arguments: --lmit 3; did you mean --limit?",
    f"{RUN} sb_stdlib,,": "The list of tasks holds an empty name",
    f"{RUN} nope*": "There is no task 'nope*'",
    f"{RUN} mmlu_[z-a]*": "There is no task 'mmlu_[z-a]*'",
    f"{RUN} sb_text_stream[1]": "There is no task 'sb_text_stream[1]'",
    "run --tasks sb_stdlib --model_args pretrained=x,skip_treshold=0": "Expected skip_threshold in --model_args",
    "run --tasks sb_stdlib --model_args pretrained=trained": "name trained/checkpoint.",
    "run --tasks sb_stdlib --model_args pretrained=trained/checkpoint": "Expected a tokenizer beside the model",
    f"{RUN} sb_span --model hf": "sb_span cannot run with the model hf",
    f"{RUN} sb_stdlib --batch_size abc": "Expected batch_size to be a positive number or auto, found 'abc'",
    "report models -o out": "There are no result files of lm-eval (results_*.json) below models",
    "demo --text nope": "Expected text at data_path 'nope', found nothing there",
    "train no_such_recipe": "no recipe file at no_such_recipe",
    "train demo_rope --data nope": "nope holds no token arrays: tokens.npy is missing",
    "train --text nope": "found nothing at 'nope'",
    f"train --text {CHECKPOINT}/config.json --tokenizer no/such/tokenizer": "Expected a tokenizer at",
    "train --text text.txt --tokenizer nope": "Expected a tokenizer at 'nope', found no such folder",
    "extend /no/such --data text.txt --context 2048 --out out": "Expected a checkpoint to extend at '/no/such'",
    "extend nope --data text.txt --context 2048 --out out": "Expected a checkpoint to extend at 'nope'",
    "extend models --data text.txt --context 2048 --out out": "with its config.json at 'models'",
    f"extend {CHECKPOINT} --data nope --context 2048 --out out": "found nothing at 'nope'",
    f"extend {CHECKPOINT} --data text.txt --context 2048 --out out --rope-scaling yran:4": "got 'yran:4'",
    "convert /no/such out": "Expected a checkpoint at '/no/such', found nothing there",
    "convert text.txt out": "found a file at 'text.txt'",
    "convert nope out": "Expected a checkpoint at 'nope', found no such folder, and neither the hub nor its cache",
    f"convert {CHECKPOINT} out --dtype bf61": "found 'bf61'",
    "inspect /no/such": "Expected a checkpoint at '/no/such', found nothing there",
    "inspect ~nobodyxx/a": "Expected a home folder for '~nobodyxx', found none",
    "convert ~nobodyxx/a out": "Expected a home folder for '~nobodyxx', found none",
    **{
        command: "Expected a home folder for '~nobodyxx', found none"
        for command in (
            *("train --text ~nobodyxx/a", "train demo_rope --out ~nobodyxx/a"),
            *(f"convert {CHECKPOINT} ~nobodyxx/a", "demo --results ~nobodyxx/a", "demo -o ~nobodyxx/a"),
            *("report ~nobodyxx/a", "report models -o ~nobodyxx/a", f"{RUN} sb_stdlib --output_path ~nobodyxx/a"),
            *("sweep --suite paper-nlp x -o ~nobodyxx/a", f"{RUN} sb_text --metadata data_path=~nobodyxx/a"),
            f"extend {CHECKPOINT} --data text.txt --context 2048 --out ~nobodyxx/a",
        )
    },
    **{
        f"{command} {'y' * 300}": "(File name too long): correct it."
        for command in ("inspect", "report", "train --text", f"{RUN} sb_stdlib --output_path", "report models -o")
    },
    f"run --tasks sb_text --metadata context_lengths=8 --model_args pretrained={'y' * 300}": "(File name too long)",
    f"{LOADED} sb_stdlib --use_cache text.txt/a": "folder 'text.txt' cannot be written to, for answers",
    f"{LOADED} sb_stdlib --use_cache /proc/a": "folder '/proc' cannot be written to, for answers",
    **{
        f"{name}=x {RUN} sb_stdlib": f"the environment variable {name}, found 'x': unset it"
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    },
    "ACCELERATE_USE_CPU=2 tasks": "Expected true or false in the environment variable ACCELERATE_USE_CPU, found '2'",
    "LOGLEVEL=x tasks": "Expected a level such as INFO in LOGLEVEL, which torch reads, found 'x'",
    "LOGLEVEL=debug inspect /no/such": "Expected a checkpoint at '/no/such'",
    "RANK= inspect /no/such": "Expected a checkpoint at '/no/such'",
    "inspect models": "Expected a checkpoint with its config.json at 'models'",
}
# what lm-eval's own command answers as it does for every model
OTHERWISE = ("--lmit", "--model hf", "--model local-completions", "--model vllm")
PLAIN = {
    f"lm_eval --model sb {command.removeprefix('run ')}": sentence
    for command, sentence in SENTENCES.items()
    if command.startswith("run ") and not any(words in command for words in OTHERWISE)
}
# what is found with torch imported, most of it by lm-eval alone
LATER = {
    f"convert {CHECKPOINT} trained": "trained is not empty; choose a new or empty folder",
    f"{LOADED} sb_stdlib --wandb_args nope=1": "got an unexpected keyword argument 'nope'",
    f"{LOADED} sb_stdlib --hf_hub_log_args nope=1": "got an unexpected keyword argument 'nope'",
    f"{LOADED} sb_stdlib --hf_hub_log_args push_results_to_hub=True": "Hugging Face token is not defined",
    f"run --tasks negative.yaml --model_args pretrained={CHECKPOINT}": "Unknown config shape: keys=['seed']",
    f"inspect {CHECKPOINT} --tasks negative.yaml": "lm-eval cannot load --tasks: Unknown config shape",
    f"inspect {CHECKPOINT} --tasks 2": "lm-eval cannot load --tasks",
    f"inspect {CHECKPOINT} --tasks ~nobodyxx/a": "lm-eval cannot load --tasks: Could not",
    f"{LOADED} sb_stdlib --log_samples": "Specify --output_path",
}
# one process for all, since starting it is most of what a refusal takes
IN_TURN = """
import contextlib, io, json, os, sys
from lm_eval.__main__ import cli_evaluate
from sbeval.__main__ import main
from sbeval.errors import UserError
ended = {}
for command in json.loads(sys.argv[1]):
    name, equals, value = command.split()[0].partition("=")
    sys.argv[1:] = command.removeprefix("lm_eval ").split()[bool(equals) :]
    os.environ |= {name: value} if equals else {}
    before = "torch" in sys.modules
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli_evaluate() if command.startswith("lm_eval ") else main()
            code = 0
        except UserError as error:  # as the plugin's excepthook shows it
            print(error, file=sys.stderr)
            code = 1
        except SystemExit as end:
            code = end.code
    os.environ.pop(name, None)
    ended[command] = [code, out.getvalue(), err.getvalue(), not before and "torch" in sys.modules]
print(json.dumps(ended))
"""


Ended = tuple[int, str, str, bool]
"""Exit code, what was printed to stdout and stderr, and whether torch was imported, of a command."""


def ended(commands: Iterable[str], folder: Path) -> dict[str, Ended]:
    (folder / "models").mkdir()
    files = {
        "trained/checkpoint/config.json": '{"model_type": "llama"}',
        "trained/1000/config.json": "{}",
        "text.txt": "a text",
        "negative.yaml": "seed: -1",
        "essays.yaml": "tasks: [sb_niah]\nmetadata: {essays: /no/such/place}\nmodel_args: pretrained=x",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    names = sorted(path.name for path in folder.iterdir())
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "SBEVAL_CACHE": str(folder / "cache")}
    process = run([sys.executable, "-c", IN_TURN, json.dumps([*commands])], folder=folder, environment=environment)
    assert sorted(path.name for path in folder.iterdir()) == names
    return json.loads(process.stdout.splitlines()[-1])


# one test of all, since commands that run in turn in one process cost a tenth of a start
@pytest.mark.parametrize("commands", [SENTENCES, *exhaustive(PLAIN)], ids=["sbeval", "lm_eval"])
def test_what_cannot_run_is_refused_in_one_sentence_without_torch(commands: dict[str, str], tmp_path: Path) -> None:
    found = ended(commands, tmp_path)
    assert {command: err for command, (_, _, err, _) in found.items() if commands[command] not in err} == {}
    shapes = {command: (code, out, len(err.splitlines()), torch) for command, (code, out, err, torch) in found.items()}
    assert {command: shape for command, shape in shapes.items() if shape != (1, "", 1, False)} == {}


@pytest.mark.exhaustive
def test_what_is_found_later_is_one_sentence_too(tmp_path: Path) -> None:
    there = importlib.util.find_spec("wandb") is not None
    later = {command: sentence for command, sentence in LATER.items() if there or "wandb" not in command}
    found = ended(later, tmp_path)
    last = {command: err.splitlines()[-1] for command, (_, _, err, _) in found.items()}
    assert {command: line for command, line in last.items() if later[command] not in line} == {}
    shapes = {command: (code, "Traceback" in err) for command, (code, _, err, _) in found.items()}
    assert {command: shape for command, shape in shapes.items() if shape != (1, False)} == {}


@pytest.mark.parametrize(
    ("module", "function", "error", "refused"),
    [
        ("lm_eval.evaluator", "simple_evaluate", ValueError("a"), True),
        ("lm_eval.evaluator", "evaluate", ValueError("a"), False),
        ("lm_eval._cli.run", "_execute", TypeError("got an unexpected keyword argument 'a'"), True),
        ("lm_eval.config.evaluate_config", "read", MemoryError("a"), False),
        *(("lm_eval._cli.run", "_execute", kind("a"), False) for kind in (MemoryError, OSError, TypeError, KeyError)),
    ],
    ids=str,
)
def test_what_fails_in_lm_eval_without_reading_options_stays_what_it_is(
    module: str, function: str, error: Exception, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec(f"def {function}(error): raise error", names)
    raised = pytest.raises(UserError if refused else type(error))
    with caplog.at_level("DEBUG", "lm_eval.sbeval"), raised, option_errors_explained():
        names[function](error)
    assert ("Traceback" in caplog.text) == refused


def test_a_plain_lm_eval_with_another_model_imports_none_of_our_commands() -> None:
    code = (
        "import sys; from types import SimpleNamespace; from sbeval import plugin; plugin.install()\n"
        "from lm_eval._cli.harness import HarnessCLI\n"
        "HarnessCLI().execute(SimpleNamespace(func=lambda chosen: print('ran'), model='hf', config=None))\n"
        "print([name for name in sys.modules if name.startswith('sbeval.commands')])"
    )
    assert run([sys.executable, "-c", code]).stdout == "ran\n[]\n"
