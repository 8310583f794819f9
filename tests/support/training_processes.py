"""Several processes of one training command, as `accelerate launch` starts them.

Run as a script it is one of them, for a command whose weights are sharded: accelerate shards on accelerators alone, so
its own record of the processes is told that these CPUs are some. Everything else is as it is on accelerators.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module


def run_processes(module: str, arguments: Sequence[str], *, sharded: bool = False, processes: int = 2) -> None:
    """Runs `module` of `sbeval.training` in several processes on this machine's CPUs and waits for all."""
    command = [sys.executable, __file__, module] if sharded else [sys.executable, "-m", f"sbeval.training.{module}"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen([*command, *arguments], env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(processes))
    ]
    codes = [process.wait(timeout=240) for process in started]
    assert codes == [0] * processes, codes


def _shard_on_cpus() -> None:
    from accelerate import state
    from accelerate.utils import DistributedType

    plain = state.PartialState.__init__

    def with_accelerators(self: state.PartialState, *args: object, **kwargs: object) -> None:
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    state.PartialState.__init__ = with_accelerators


if __name__ == "__main__":
    _shard_on_cpus()
    import_module(f"sbeval.training.{sys.argv[1]}").main(sys.argv[2:])
