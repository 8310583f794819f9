"""`sbeval launch`: starts a command of sbeval in several processes, on one or more machines, with accelerate."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from sbeval.errors import UserError, first_line
from sbeval.processes.ranks import GONE, LAUNCHED, notify_machines
from sbeval.processes.signals import EndedBySignal

_COMMANDS = ("run", "train", "extend")


def launch(arguments: Sequence[str]) -> None:
    """Starts several processes. `arguments` are options of `accelerate launch`, a command, and the command's options.

    Raises:
        SystemExit: a process failed. The error of the first one, or how it ended, is printed.
        UserError: the processes cannot be started with these options.
        EndedBySignal: a signal asked this process to end.
    """
    parser = launch_command_parser()
    parser.usage = f"sbeval launch [options of `accelerate launch`] {{{','.join(_COMMANDS)}}} [options of the command]"
    chosen = _as_module(parser.parse_args(list(arguments)))
    # without PYTHONSAFEPATH a checkout in the current folder would hide the installed package
    os.environ |= {LAUNCHED: "1", "PYTHONSAFEPATH": "1"}
    logging.disable(logging.CRITICAL)  # silenced in this process only, since launchers log pages about a failure
    try:
        launch_command(chosen)
    except ChildFailedError as error:
        why, on_the_board = _why(error.failures)
        print(f"\n{UserError(why)}", file=sys.stderr)  # the line break ends an interrupted progress bar
        machine, machines = chosen.machine_rank or 0, chosen.num_machines or 1
        if machines > 1 and why != GONE and (machine == 0 or not on_the_board):
            store = (chosen.main_process_ip, int(chosen.main_process_port))
            notify_machines(*store, why, machine=machine, machines=machines)
        raise SystemExit(1) from None
    except SignalException as error:
        raise EndedBySignal(error.sigval) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None
    except ConnectionError:
        raise UserError(
            f"The port {chosen.main_process_port} for the processes is in use: name a free one with "
            "--main_process_port."
        ) from None
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise UserError(f"The processes could not be started with these options: {first_line(error)}") from error


def _as_module(chosen: Any) -> Any:
    """Changes accelerate's options so that they run a command of sbeval as a Python module, and returns them."""
    if not chosen.module:
        if chosen.training_script not in _COMMANDS:
            raise UserError(
                f"Expected {', '.join(_COMMANDS[:-1])} or {_COMMANDS[-1]} after the launcher's options, found "
                f"{chosen.training_script!r}: write `sbeval launch --num_processes 2 run ...`."
            )
        chosen.training_script_args = [chosen.training_script, *chosen.training_script_args]
        chosen.training_script = "sbeval"
        chosen.module = True
    if (chosen.num_processes or 1) > 1 and not (chosen.use_fsdp or chosen.use_deepspeed or chosen.use_megatron_lm):
        chosen.multi_gpu = True  # accelerate's name for several processes, also on CPUs
    if (chosen.num_machines or 1) == 1 and chosen.main_process_port is None:
        chosen.main_process_port = 0
    return chosen


def _why(failures: Any) -> tuple[str, bool]:
    """Returns the error of the first process that failed, or how it ended; and whether other machines know it."""
    # an error file that this package wrote has a timestamp; torch makes one without a timestamp for a process that
    # wrote no error file
    error_files = [failure.error_file_data for failure in failures.values()]
    if ours := [error_file for error_file in error_files if "timestamp" in error_file]:
        earliest = min(ours, key=lambda error_file: (error_file["message"] == GONE, error_file["timestamp"]))
        return str(earliest["message"]), bool(earliest.get("on_the_board"))
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    ended = first.signal_name() if first.exitcode < 0 else f"exit code {first.exitcode}"
    why = (
        f"Rank {rank}, process {first.pid} on {socket.gethostname()}, ended with {ended}: look at its last output, and "
        "whether memory ran out."
    )
    return why, False
