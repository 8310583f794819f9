"""The processes of a command: starting several ranks, ending all of them when one fails, errors, signals and
progress.

- `launch`: `sbeval launch`, which starts several processes and prints the error of the one that failed
- `ranks`: this process's rank, and the thread that ends it when another rank fails
- `signals`: signals as exceptions
- `ending`: the end of a command: an error as one sentence, a signal, a closed pipe
- `progress`: one progress bar over all stages of a command
- `next_step`: the last line of a command, which names the next command to run
- `garbage`: pauses Python's garbage collector during imports, and switches it off for the exit

Decisions:

- An error message under one key of the launcher's store ends all ranks. lm-eval sets the timeout of collectives to a
  year, and a rank that waits in a collective runs no signal handler of Python. So each rank has a thread that polls a
  key of the TCPStore at which the ranks met, and ends the process when the key holds an error message.
- `sbeval launch` runs accelerate's launcher in its own process, so that it can print that message in place of
  accelerate's long report about a failed child.
- `ending.reporting_errors` wraps the body of every command. A signal becomes an exception, so that temporary files
  are removed. An error of a disk, path, network or memory becomes one sentence, whichever library raised it. An
  exception from a bug of this package keeps its traceback.
"""
