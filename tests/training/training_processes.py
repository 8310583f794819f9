"""Several processes of one training command, as `accelerate launch` starts them.

accelerate shards weights on accelerators alone, so where they are to be sharded its own record of the processes is told
that these CPUs are some. Everything else is as it is on accelerators.
"""

from collections.abc import Sequence
from importlib import import_module

from ranks import run_ranks


def run_processes(module: str, *commands: Sequence[str], sharded: bool = False, processes: int = 2) -> None:
    """Runs commands of a module of `sbeval.training`, one after the other, in several processes on CPUs."""
    run_ranks(_run, module, sharded, commands, processes=processes)


def _run(rank: int, module: str, sharded: bool, commands: Sequence[Sequence[str]]) -> None:
    if sharded:
        _shard_on_cpus()
    main = getattr(import_module("sbeval.training.command"), f"{module}_command")
    for command in commands:
        main(list(command))


def _shard_on_cpus() -> None:
    from accelerate import state
    from accelerate.utils import DistributedType

    plain = state.PartialState.__init__

    def with_accelerators(self: state.PartialState, *args: object, **kwargs: object) -> None:
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    state.PartialState.__init__ = with_accelerators
