"""sbeval: what happens to a language model when its context grows past its training length?

- `attention`: stick-breaking attention, one operation with several implementations
- `attn_implementation`: how do transformers' models find it by name?
- `models`: the model family, and what its layers are made of
- `checkpoints`: which formats are read, and how they become models of the family
- `inspection`: what a checkpoint is, what memory and time it takes, before its weights are read
- `evaluation`: how is a model in memory evaluated, at once or while it trains?
- `scoring`: log-probabilities of chosen tokens, and the requests that ask for them
- `corpora`: text sources, and their tokens on disk
- `results`: what a results file records, and how sure its numbers are
- `keeping`: how what is kept is written, held, found again and told apart
- `fingerprint`: what a number depends on, by content, and which part of it has changed
- `training`: training of small models, and context extension
- `processes`: how the processes of a command start and end
- `harness`: lm-eval's options and its `run` command, as `sbeval run` uses them
- `commands`: the command `sbeval` and its sub-commands
- `sweep`: many checkpoints, one process and one results file a run
- `demo`: two small checkpoints, and what is evaluated with them
- `paper`: the paper's published values
- `tasks`: lm-eval's side of a task
- `model_adapters`: lm-eval's side of a model, `sb`
- `reports`: results files in, a page out
- `report_options`: which options has `sbeval report`?
- `__main__`: how does it start?
- `policy`: what may the file of `sbeval report --gate` hold?
- `registered`: under which names does lm-eval find model and tasks?
- `plugin`: how does a plain `lm_eval` command learn of model and tasks?
- `settings`: how is what a user sets read?
- `rope_parameters`: what may be written of RoPE's scaling?
- `hub_names`: what stands for a checkpoint, a folder or an id of the hub, and which commit of it is here?
- `foreign_files`: how are JSON and YAML read that others wrote?
- `errors`: what does a user's mistake look like?

Importing this package imports no torch: the public names below are resolved when first used. It makes transformers
and lm-eval know the family, the model `sb` and the packaged tasks, each when it is asked for.
"""

import importlib
import signal
import sys

# until the command heeds signals itself, Ctrl-C ends it at once and prints nothing
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
    if name in __all__:  # torch and more come along
        module = "sbeval.attention" if name in _IN_ATTENTION else "sbeval.evaluation"
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'sbeval' has no attribute {name!r}")
