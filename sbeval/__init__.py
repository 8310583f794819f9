"""sbeval: what happens to a language model when its context grows past its training length?

- `attention`: stick-breaking attention: one operation, several implementations
- `attn_implementation`: stick-breaking attention for transformers' models, `attn_implementation="stickbreaking"`
- `models`: this project's model family and its layers
- `checkpoints`: the checkpoint formats, and how they are loaded as models of the family
- `inspection`: facts about a checkpoint, its memory and time, without reading its weights
- `planning`: which differences a number of documents shows, and what they cost
- `evaluation`: evaluates a model in memory, once or during its training
- `scoring`: log-probabilities of target tokens, and the request types of tasks
- `caches`: quantized, static, offloaded and users' KV caches
- `corpora`: text sources, and their tokens on disk
- `results`: the records in results files, and confidence intervals
- `keeping`: atomic writes, locks, the cache folder, and content hashes
- `fingerprint`: the inputs of a result by content hash, and which of them have changed
- `training`: training of small models, and context extension
- `processes`: starting several ranks, ending all of them, errors and signals
- `harness`: lm-eval's options and its `run` command, as `sbeval run` uses them
- `commands`: the command `sbeval` and its sub-commands
- `sweep`: runs of many checkpoints, each a process with one results file
- `demo`: two small checkpoints, and their evaluation
- `paper`: the paper's published values
- `tasks`: the tasks for lm-eval
- `model_adapters`: the model `sb` for lm-eval
- `reports`: builds a page from results files
- `report_options`: the options of `sbeval report`
- `__main__`: the entry point of the command
- `policy`: the settings of a `sbeval report --gate` file
- `registered`: the names under which lm-eval finds the model and the tasks
- `variables`: environment variables that several modules read
- `plugin`: registers the model and the tasks with a plain `lm_eval` command, by import hooks
- `settings`: reads and checks settings of users
- `task_metadata`: task settings from `SBEVAL_METADATA`, beside those of `--metadata`
- `rope_parameters`: reads and checks RoPE parameters
- `hub_names`: names of checkpoints and tokenizers: folders, or hub ids and their cached commits
- `foreign_files`: reads JSON and YAML files that other programs wrote
- `errors`: `UserError`, and the parts of its messages

Importing this package does not import torch: public names are resolved when first used. It installs import hooks
(`plugin`), by which transformers and lm-eval find the model family, the model `sb` and the packaged tasks.

Decisions:

- The package extends lm-eval; it is not a harness of its own. Users keep their command line, tasks, caches and results
  files, and every ordinary task runs on the same model. Nothing of lm-eval is copied.
- `tasks/`, `reports/` and `model_adapters/` are folders beside `sbeval/` and are installed as `sbeval.tasks` and so on
  (setuptools' `package-dir`), so that the wheel has one import name. `make editor` lays the installed tree out with
  links for editors and type checkers. The list of packages is written out, and a test compares it with the folders.
- A user's mistake is one sentence, a `UserError`: what is wrong and what to do. Text from files of others reaches a
  terminal only through `errors.visible`.
"""

import importlib
import signal
import sys

# until the command installs its own signal handlers, Ctrl-C ends it at once without a traceback
if (
    "".join(sys.argv[:1]).rpartition("/")[2] == "sbeval" or (sys.argv[:1] == ["-m"] and "sbeval" in sys.orig_argv)
) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from typing import TYPE_CHECKING, Any

from sbeval.errors import UserError
from sbeval.plugin import complete_imports

if TYPE_CHECKING:
    from sbeval.attention import StickBreakingOutput, stickbreaking_attention
    from sbeval.evaluation import Curve, LengthsCallback, evaluate

__version__ = "0.1.0"
complete_imports()
__all__ = ["Curve", "LengthsCallback", "StickBreakingOutput", "UserError", "evaluate", "stickbreaking_attention"]
__all__ += ["__version__"]
_IN_ATTENTION = ("StickBreakingOutput", "stickbreaking_attention")


def __getattr__(name: str) -> Any:
    if name in __all__:  # imports torch
        module = "sbeval.attention" if name in _IN_ATTENTION else "sbeval.evaluation"
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'sbeval' has no attribute {name!r}")
