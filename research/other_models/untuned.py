"""Runs `sbeval` with every Triton kernel in the first of its configurations that runs, once compiled and never timed.

    python research/other_models/untuned.py run --tasks ...

A tuned kernel is compiled in all its configurations, often dozens, to find its fastest: minutes for a model that is to
run once. What is computed is the same. Set TRITON_CACHE_DIR, so that no other process takes the choice for a tuned one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from triton.runtime.autotuner import Autotuner


def stop_tuning() -> None:
    """Makes Triton's tuner choose the first configuration that runs, whatever its speed."""
    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def begin(self: Any, kwargs: dict[str, Any]) -> Any:
        self.chosen = False  # it prunes once before it tries a kernel's configurations in turn
        return prune(self, kwargs)

    def bench_until_one_runs(self: Any, *args: Any, config: Any, **meta: Any) -> Sequence[float]:
        if self.chosen:
            return [math.inf] * 3
        seconds: Sequence[float] = bench(self, *args, config=config, **meta)  # infinite where it needs too much memory
        self.chosen = math.isfinite(seconds[0])
        return seconds

    def call_once(call: Callable[[], None], quantiles: Sequence[float]) -> Sequence[float]:
        call()
        return [0.0] * len(quantiles)

    Autotuner.prune_configs, Autotuner._bench = begin, bench_until_one_runs
    Autotuner.do_bench = staticmethod(call_once)


if __name__ == "__main__":
    from sbeval.__main__ import main

    stop_tuning()
    main()
