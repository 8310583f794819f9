"""All tasks of this project are lm-eval tasks through one class."""

import importlib

from lm_eval.api.task import ConfigurableTask
from source_tree import layer, modules

from sbeval.tasks.base import BaseTask


def test_only_the_base_derives_from_lm_eval_s_own_class() -> None:
    for name in modules():
        if layer(name) == "tasks":
            importlib.import_module(name)
    ours = [kind for kind in ConfigurableTask.__subclasses__() if kind.__module__.startswith("sbeval.")]
    assert ours == [BaseTask]
