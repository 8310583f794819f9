"""`sbeval launch`: a command of sbeval in several processes, on one machine or several, by accelerate's launcher."""

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
from sbeval.processes.ranks import LAUNCHED, tell_machines
from sbeval.processes.signals import AskedToEnd

_COMMANDS = ("run", "train", "extend")


def launch(arguments: Sequence[str]) -> None:
    """Runs options of `accelerate launch`, a command and its own options, in several processes.

    Raises:
        UserError: what the first process that failed said, or how it ended.
        AskedToEnd: this process was asked to end.
    """
    chosen = _as_module(launch_command_parser().parse_args(list(arguments)))
    # a checkout in the current folder is not the installed package
    os.environ |= {LAUNCHED: "1", "PYTHONSAFEPATH": "1"}
    logging.disable(logging.CRITICAL)  # of this process alone: launchers tell of a failure in pages
    try:
        launch_command(chosen)
    except ChildFailedError as error:
        why, on_the_board = _why(error.failures)
        print(file=sys.stderr)  # behind a progress bar that was cut off
        if (chosen.num_machines or 1) > 1 and not on_the_board:
            tell_machines(chosen.main_process_ip, int(chosen.main_process_port), why)
        raise UserError(why) from None
    except SignalException as error:
        raise AskedToEnd(error.sigval) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None
    except ConnectionError:
        raise UserError(
            f"Expected a free port for the processes to meet at, found {chosen.main_process_port} in use: name another "
            "one with --main_process_port."
        ) from None
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise UserError(f"Expected processes to start as the options say, found: {first_line(error)}") from error


def _as_module(chosen: Any) -> Any:
    """Returns accelerate's options with the command as a module of Python."""
    if not chosen.module:
        if chosen.training_script not in _COMMANDS:
            raise UserError(
                f"Expected {', '.join(_COMMANDS[:-1])} or {_COMMANDS[-1]} behind the launcher's options, found "
                f"{chosen.training_script!r}: write `sbeval launch --num_processes 2 run ...`."
            )
        chosen.training_script_args = [chosen.training_script, *chosen.training_script_args]
        chosen.training_script = "sbeval"
        chosen.module = True
    if (chosen.num_processes or 1) > 1 and not (chosen.use_fsdp or chosen.use_deepspeed or chosen.use_megatron_lm):
        chosen.multi_gpu = True  # accelerate's word for several processes, on CPUs too
    if (chosen.num_machines or 1) == 1 and chosen.main_process_port is None:
        chosen.main_process_port = 0
    return chosen


def _why(failures: Any) -> tuple[str, bool]:
    """Returns what the first process to fail said, or else how it ended; and whether other machines know of it."""
    # what a process of ours leaves holds a time; torch fills in for one that left nothing
    if left := [failure.error_file_data for failure in failures.values() if "timestamp" in failure.error_file_data]:
        first_left = min(left, key=lambda said: said["timestamp"])
        return str(first_left["message"]), bool(first_left.get("on_the_board"))
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    ended = first.signal_name() if first.exitcode < 0 else f"exit code {first.exitcode}"
    why = (
        f"Expected every process to end well, found that rank {rank}, process {first.pid} on {socket.gethostname()}, "
        f"ended with {ended}: see what it said last, or whether memory ran out."
    )
    return why, False
