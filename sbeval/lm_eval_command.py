"""lm-eval's own `run` command in this process, with the model and the task folder already set."""

import argparse
import sys
from collections.abc import Sequence

from sbeval import plugin


def run(arguments: Sequence[str]) -> None:
    """Runs `lm_eval run` with these arguments, the model `sb` and the packaged tasks.

    Args:
        arguments: what would follow `lm_eval run` on the command line.

    Raises:
        UserError: what the model or the tasks found wrong with the input.
        SystemExit: lm-eval printed its help, or refused an argument.
    """
    plugin.install()
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    HarnessCLI().execute(parse(arguments))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses as lm-eval does, and adds what neither the arguments nor their `--config` file say.

    That is the model `sb`, and `--log_samples` where there is an output path: paired differences need the samples.
    """
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

    command_line = sys.argv
    sys.argv = ["lm_eval", "run", *arguments]
    try:
        chosen: argparse.Namespace = HarnessCLI().parse_args()
    finally:
        sys.argv = command_line
    configured = EvaluatorConfig.load_yaml_config(chosen.config) if chosen.config else {}
    if chosen.model is None and "model" not in configured:
        chosen.model = plugin.MODEL_NAME
    if chosen.output_path or configured.get("output_path"):
        chosen.log_samples = True
    return chosen
