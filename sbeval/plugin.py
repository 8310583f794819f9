"""Registers the model `sb` and the packaged tasks with a plain `lm_eval`, and the model family with transformers.

lm-eval up to 0.4.13 has no plugin discovery. So `sbeval_autoload.pth`, a line that Python runs at start-up, installs a
finder that waits for the first import of `lm_eval` and then calls `install`. A `.pth` file is the only way for a
package to act on a console script of another package. A wheel contains it; for an editable install `sbeval
install-plugin` writes it.

From then on, and after `import sbeval`, an import hook monkey-patches these modules right after they are executed:

- `lm_eval.models`: registers the name `sb` with a string target, so that the adapter is imported only when the name is
  looked up. This must come after lm-eval's own registration, which lm-eval skips if its registry is not empty.
- `lm_eval.tasks.manager`: also scans the packaged task folder, so that `--include_path` is not needed (of two tasks
  with one name, the user's wins). The error about an unknown `sb_` task names similar ones. The settings in
  `SBEVAL_METADATA` are added to the metadata of all tasks.
- `lm_eval._cli.harness`: for the model `sb`, makes the checks of `sbeval run` before torch is imported.
- `lm_eval.api.model`: every model that scores tokens (`TemplateLM`) answers this project's request types as far as sums
  of log-probabilities allow, and stores the arguments with which it was made. Models that call a server or an engine
  check each answer. `sb` also counts answers from a response cache.
- `lm_eval.models.api_models`: names the extra to install if packages are missing, and logs only the beginning of a
  server's answer.
- `lm_eval.models.gguf`: checks each answer of a llama.cpp server.
- `lm_eval.evaluator`: rejects tasks that a model cannot answer before the model is loaded.
- `lm_eval.loggers.utils`: hides git's error message outside a repository.
- transformers' `AutoConfig`: imports this project's model family when it meets its `model_type`, so that
  `AutoModelForCausalLM` and lm-eval's `hf` load it. An import at start-up would cost every user three seconds.
- transformers' attention registry: adds `attn_implementation="stickbreaking"`. An existing entry is left unchanged.
- transformers' fast tokenizers: raise an error if the tokenizers library panics while it encodes a text.

`SBEVAL_NO_AUTOLOAD=1` switches all of this off for lm-eval. Only the standard library is imported here.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

from sbeval.errors import ENCODING, UserError, panics_as_errors
from sbeval.registered import MODEL_NAME, TASK_PREFIX, includes_lm_eval_tasks, with_packaged_tasks
from sbeval.variables import METADATA_VARIABLE

MODEL_TARGET = "sbeval.model_adapters.lm:StickBreakingLM"
ANSWERING = "sbeval.model_adapters.any_model"
GUARDED = "sbeval.scoring.guarded"
API_PACKAGES = ("aiohttp", "tenacity", "requests", "tqdm")
MOST_LOGGED_CHARACTERS = 2000
ANSWERED_BY_SUMS = ("token_logprobs", "target_logprobs")
READERS = ("parse_logprobs", "_parse_logprobs", "parse_generations")
FAMILY_PACKAGE = "sbeval.models"
FAMILY = "sbeval"


def install() -> None:
    """Installs the import hook, and an excepthook that prints a `UserError` without a traceback; idempotent."""
    complete_imports()
    if getattr(sys.excepthook, "__module__", None) != __name__:
        _install_excepthook()


def complete_imports() -> None:
    """Patches modules of lm-eval and transformers, now or when they are imported; idempotent."""
    if any(isinstance(finder, _CompletingFinder) for finder in sys.meta_path):
        return
    for name, complete in _COMPLETIONS.items():
        if name in sys.modules:
            complete(sys.modules[name])
    sys.meta_path.insert(0, _CompletingFinder())


def _register_model(models: ModuleType) -> None:
    from lm_eval.api.registry import model_registry  # lm-eval must not be imported before the user imports it

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=MODEL_TARGET)


def _complete_task_manager(manager: ModuleType) -> None:
    original, original_match = manager.TaskManager.__init__, manager.TaskManager.match_tasks
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialise(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["include_defaults"]:
            bound.arguments["include_path"] = with_packaged_tasks(bound.arguments["include_path"])
            bound.arguments["include_defaults"] = includes_lm_eval_tasks()
        if os.environ.get(METADATA_VARIABLE):
            given = importlib.import_module("sbeval.task_metadata")
            passed = "the program that runs lm-eval"
            bound.arguments["metadata"] = given.with_environment(bound.arguments["metadata"] or {}, passed=passed)
            given.say_sources({})
        original(*bound.args, **bound.kwargs)

    @functools.wraps(original_match)
    def match_tasks(self: Any, task_list: Sequence[str]) -> list[str]:
        matching: list[str] = original_match(self, task_list)
        if not matching:
            importlib.import_module("sbeval.tasks.packaged").check_names(
                [name for name in task_list if name.startswith(TASK_PREFIX)]
            )
        return matching

    manager.TaskManager.__init__, manager.TaskManager.match_tasks = initialise, match_tasks


def _check_runs(harness: ModuleType) -> None:
    original_parse, original_execute = harness.HarnessCLI.parse_args, harness.HarnessCLI.execute

    @functools.wraps(original_parse)
    def parse_args(self: Any) -> Any:
        if MODEL_NAME not in sys.argv:
            return original_parse(self)
        with importlib.import_module("sbeval.harness.options").option_errors_explained():
            return original_parse(self)

    @functools.wraps(original_execute)
    def execute(self: Any, chosen: Any) -> None:
        if getattr(chosen, "model", None) != MODEL_NAME and not getattr(chosen, "config", None):
            return original_execute(self, chosen)  # type: ignore[no-any-return]
        cli = importlib.import_module("sbeval.commands.cli")
        evaluate = functools.partial(original_execute, self, chosen)
        importlib.import_module("sbeval.harness.run").run_plain(chosen, evaluate, cli.check_run, cli.find_finished)

    harness.HarnessCLI.parse_args, harness.HarnessCLI.execute = parse_args, execute


def _complete_models(model: ModuleType) -> None:
    original = model.CachingLM.__getattr__

    def get_attribute(self: Any, name: str) -> Any:
        value = original(self, name)
        if name != "generate_until":
            return value
        count_answers = getattr(self.lm, "count_answers", None)
        if count_answers is None:
            return value

        def generate_and_count(requests: Sequence[Any]) -> Any:
            answers = value(requests)
            count_answers(requests, answers)
            return answers

        return generate_and_count

    model.CachingLM.__getattr__ = get_attribute
    _answer_by_sums(model)


def _answer_by_sums(model: ModuleType) -> None:
    def answer(lm: Any, request_type: str, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        return getattr(importlib.import_module(ANSWERING), request_type)(lm, requests, quiet=disable_tqdm)

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        lm: Any = object.__new__(kind)
        lm.sbeval_arguments = args, kwargs
        if any(hasattr(kind, reader) for reader in READERS):
            importlib.import_module(GUARDED).guard(lm)
        return lm

    model.TemplateLM.__new__ = new
    for request_type in ANSWERED_BY_SUMS:
        setattr(model.TemplateLM, request_type, functools.partialmethod(answer, request_type))


def _complete_api_models(api: ModuleType) -> None:
    original = api.TemplateAPI.__init__

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        missing = [package for package in API_PACKAGES if importlib.util.find_spec(package) is None]
        if missing:
            raise UserError(
                f"lm-eval's models of servers need {' and '.join(missing)}, not installed: "
                "run pip install 'sbeval[api]'."
            )
        try:
            original(self, *args, **kwargs)
        except ModuleNotFoundError as error:
            package = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else error.name
            raise UserError(
                f"This model of lm-eval needs {package or 'packages'}, not installed: run pip install "
                f"{package or 'lm-eval[api]'}."
            ) from error

    api.TemplateAPI.__init__ = initialise
    api.eval_logger.addFilter(_log_beginnings)


def _log_beginnings(record: Any) -> bool:
    message = record.getMessage()  # may contain a server's whole answer
    if len(message) > MOST_LOGGED_CHARACTERS:
        record.msg = f"{message[:MOST_LOGGED_CHARACTERS]} ..."
        record.args = ()
    return True


def _guard_gguf(gguf: ModuleType) -> None:
    importlib.import_module(GUARDED).guard_gguf(gguf.GGUFLM)


def _refuse_models(evaluator: ModuleType) -> None:
    original = evaluator.simple_evaluate
    signature = inspect.signature(original)

    @functools.wraps(original)
    def simple_evaluate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        class_of = importlib.import_module("lm_eval.api.registry").get_model
        names = [task for task in bound.get("tasks") or () if isinstance(task, str)]
        importlib.import_module("sbeval.tasks.packaged").check_model(bound["model"], names, class_of)
        return original(*args, **kwargs)

    evaluator.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]


def _run_git_quietly(utils: Any) -> None:
    quiet_check_output = functools.partial(utils.subprocess.check_output, stderr=utils.subprocess.DEVNULL)
    utils.subprocess = SimpleNamespace(**{**vars(utils.subprocess), "check_output": quiet_check_output})


def _know_the_family(configuration: ModuleType) -> None:
    original = configuration.AutoConfig.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            if f"`{FAMILY}`" not in str(error) or FAMILY_PACKAGE in sys.modules:
                raise
        importlib.import_module(FAMILY_PACKAGE)
        return original(*args, **kwargs)

    configuration.AutoConfig.from_pretrained = staticmethod(functools.wraps(original)(from_pretrained))


def _offer_attention(modeling: ModuleType) -> None:
    # torch is already imported here, and the rest of this import takes 12 ms
    offered = importlib.import_module("sbeval.attn_implementation")
    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    if offered.NAME in modeling.ALL_ATTENTION_FUNCTIONS:
        return
    modeling.ALL_ATTENTION_FUNCTIONS.register(offered.NAME, offered.attend)
    masks.register(offered.NAME, offered.texts)
    original = modeling.PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def get_correct_attn_implementation(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> Any:
        # transformers accepts any registered name, even for models that do not use the registry
        if requested == offered.NAME:
            offered.check_model(self)
        return original(self, requested, *args, **kwargs)

    modeling.PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _print_panics(backends: ModuleType) -> None:
    # all methods that encode text call this one
    backends.TokenizersBackend._encode_plus = panics_as_errors(ENCODING)(backends.TokenizersBackend._encode_plus)


def _install_excepthook() -> None:
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, UserError):
            _print_line(str(error))
        elif issubclass(kind, KeyboardInterrupt) and {MODEL_NAME, f"--model={MODEL_NAME}"} & {*sys.argv}:
            _print_line("Ended by SIGINT; the same command can be run again.")
        else:
            previous(kind, error, traceback)

    sys.excepthook = show


_COMPLETIONS: dict[str, Callable[[ModuleType], None]] = {
    "lm_eval.models": _register_model,
    "lm_eval._cli.harness": _check_runs,
    "lm_eval.api.model": _complete_models,
    "lm_eval.models.api_models": _complete_api_models,
    "lm_eval.models.gguf": _guard_gguf,
    "lm_eval.tasks.manager": _complete_task_manager,
    "lm_eval.evaluator": _refuse_models,
    "lm_eval.loggers.utils": _run_git_quietly,
    "transformers.models.auto.configuration_auto": _know_the_family,
    "transformers.modeling_utils": _offer_attention,
    "transformers.tokenization_utils_tokenizers": _print_panics,
}


class _CompletingFinder(importlib.abc.MetaPathFinder):
    """An import finder: takes a module's spec from the other finders, and patches the module after it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _COMPLETIONS:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _complete_after(spec.loader, _COMPLETIONS[fullname])
        return spec


def _print_line(line: str) -> None:
    """Prints a line on standard error, and ignores errors: it may be closed, full, or a pipe without a reader.

    The line bypasses Python's buffer. Data left in a buffer would fail again at exit, with another exit code.
    """
    with contextlib.suppress(Exception):
        written = f"{line}\n".encode(getattr(sys.stderr, "encoding", None) or "utf-8", "backslashreplace")
        try:
            number = sys.stderr.fileno()
        except Exception:  # the stream of a notebook or a test has no file descriptor
            sys.stderr.write(written.decode(sys.stderr.encoding or "utf-8"))
        else:
            sys.stderr.flush()
            os.write(number, written)


def _complete_after(loader: Any, complete: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            complete(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a program that imports lm-eval may not use sbeval
            _print_line(
                f"lm_eval goes on without the model sb or its tasks, since sbeval cannot patch {module.__name__} "
                f"({error!a}): install sbeval again beside this lm-eval"
            )

    loader.exec_module = exec_module
