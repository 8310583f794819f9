"""lm-eval's own `run` command in this process, with the model and the task folder already set."""

import sys
from collections.abc import Sequence

from sbeval import plugin


def run(arguments: Sequence[str]) -> None:
    """Runs `lm_eval run` with these arguments.

    Added where neither the arguments nor their `--config` file say otherwise: the model `sb`, the packaged tasks, and
    `--log_samples` when there is an output path (paired differences are computed from samples).

    Args:
        arguments: what would follow `lm_eval run` on the command line.

    Raises:
        UserError: what the model or the tasks found wrong with the input.
        SystemExit: lm-eval printed its help, or refused an argument.
    """
    plugin.install()
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    setup_logging()
    parser = HarnessCLI()
    command_line = sys.argv
    sys.argv = ["lm_eval", "run", *arguments]
    try:
        chosen = parser.parse_args()
    finally:
        sys.argv = command_line
    configured = EvaluatorConfig.load_yaml_config(chosen.config) if chosen.config else {}
    if chosen.model is None and "model" not in configured:
        chosen.model = plugin.MODEL_NAME
    if chosen.output_path or configured.get("output_path"):
        chosen.log_samples = True
    parser.execute(chosen)
