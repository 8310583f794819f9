"""Is the command `sbeval`, or a plain `lm_eval`, for `kills.py`; ends itself before one of its writes where asked to.

    python as_sbeval.py MOMENT ARGUMENT...

MOMENT is "-", or the number of a write and of a signal: "12:9". "12:full" is a disk that is full from that write on,
"1000:size" one that takes no file of more bytes, "0:temporary" a machine without a folder for temporary files,
"0:deleted" a working folder that is gone, "1000:memory" an address space of so many MiB, "64:files" so many open files.
A sweep starts it too, with `-m sbeval ARGUMENT...`. Nothing but Python's own start comes before
the file `began`.
"""

import errno
import os
import resource
import sys
import tempfile

WRITES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "sqlite3.connect")


def main(moment: str, arguments: list[str]) -> None:
    """Counts writes below the folder `work`, and leaves their number in the file `writes` of an undisturbed run."""
    folder, writes = os.environ["SBEVAL_KILLS"], 0
    last, _, number = moment.partition(":")

    def count(event: str, values: tuple[object, ...]) -> None:
        nonlocal writes
        writing = event in WRITES or (
            event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if writing and values and str(values[0]).startswith(f"{folder}/work"):
            writes += 1
            if number == "full" and writes >= int(last):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(values[0]))
            if str(writes) == last and number.isdecimal():
                os.kill(os.getpid(), int(number))

    if number == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(last), int(last)))
    if number == "temporary":
        tempfile._candidate_tempdir_list = lambda: [f"{os.devnull}/none"]  # type: ignore[attr-defined]
    if number == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (int(last) * 2**20, int(last) * 2**20))
    if number == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(last), int(last)))
    if number == "deleted":
        os.mkdir(f"{folder}/deleted")
        os.chdir(f"{folder}/deleted")
        os.rmdir(f"{folder}/deleted")
    sys.addaudithook(count)
    sys.argv = [f"{folder}/sbeval", *arguments]
    if moment:
        open(f"{folder}/began", "w").close()
    if arguments[:1] == ["lm_eval"]:
        sys.argv = arguments
        from lm_eval.__main__ import cli_evaluate as main
    else:
        from sbeval.__main__ import main

    if arguments[:1] == ["demo"]:
        from sbeval.demo import evaluation

        evaluation.ON_CPU = (evaluation.DemoTask(name="sb_stdlib_stream", context_lengths=(64, 128), blocks=1),)
    try:
        main()
    finally:
        if last == "-":
            with open(f"{folder}/writes", "w", encoding="utf-8") as file:
                file.write(str(writes))


if __name__ == "__main__":
    words = sys.argv[1:]
    main(*(("", words[2:]) if words[:2] == ["-m", "sbeval"] else (words[0], words[1:])))
