"""An lm-eval task without prompts: its requests name tokens, and texts travel in none of its documents."""

from collections.abc import Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask


class UnpromptedTask(ConfigurableTask):  # type: ignore[misc]
    """What lm-eval asks every task for and running text does not have.

    lm-eval accepts no output type but its own four, so one is named; the requests carry their own.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        fixed = {"output_type": "loglikelihood_rolling", "metric_list": [], "test_split": "test", "num_fewshot": 0}
        super().__init__(config={key: value for key, value in config.items() if key != "class"} | fixed)

    def doc_to_text(self, doc: Any, doc_to_text: Any = None) -> str:
        """Returns nothing: texts travel as token keys."""
        return ""

    def doc_to_target(self, doc: Any, doc_to_target: Any = None) -> str:
        """Returns nothing: texts travel as token keys."""
        return ""

    def fewshot_docs(self) -> None:
        """There are no examples."""

    def fewshot_context(self, *args: Any, **kwargs: Any) -> str:
        """Returns nothing: a chat template or system prompt does not apply to running text."""
        return ""
