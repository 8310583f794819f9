"""How commands end: one sentence and 1, a signal's exit code, silence on a closed pipe; mistakes keep a traceback."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sbeval.errors import UserError, log_visibly
from sbeval.processes.ending import reporting_errors

BODY = """
import os, signal, sys, time
from sbeval.processes.ending import reporting_errors
from sbeval.errors import UserError
try:
    with reporting_errors():
        print("began", flush=True)
        {body}
finally:
    print("cleaned up", file=sys.stderr)
"""

ACTING = r"'\x1b]0;title\x07\u202eth\udcff\x9bgir'"


def started(body: str, *arguments: str | bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", BODY.format(body=body), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(body: str, *arguments: str | bytes) -> tuple[int, list[str]]:
    process = started(body, *arguments)
    words = process.communicate(timeout=600)[1].decode(errors="replace").splitlines()
    return process.returncode, words


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_in_order_with_a_shell_s_exit_code(number: signal.Signals) -> None:
    process = started("time.sleep(60)")
    assert process.stdout.readline() == b"began\n"
    process.send_signal(number)
    words = process.communicate(timeout=600)[1].decode().splitlines()
    assert process.returncode == 128 + number
    assert words == [f"Ended by {number.name}; the same command can be run again.", "cleaned up"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise UserError('Expected a, found b: mend it.')", "Expected a, found b: mend it."),
        (f"raise OSError({errno.ENOSPC}, 'No space left on device', '/x')", "The disk is full"),
        (f"raise OSError({errno.EDQUOT}, 'Disk quota exceeded')", "The disk is full"),
        ("raise RuntimeError('I/O error: File too large (os error 27)')", "The disk is full"),
        ("raise RuntimeError('[enforce fail at inline_container.cc:664]')", "The disk is full"),
        ("open('/no/such/folder/file', 'w')", "No such file or directory at '/no/such/folder/file'"),
        (f"raise ConnectionRefusedError({errno.ECONNREFUSED}, 'Connection refused')", "network request failed (C"),
        ("raise TimeoutError('timed out')", "network request failed (timed out)"),
        ("import socket; raise socket.gaierror(-2, 'Name or service not known')", "service not known): check the name"),
        (
            "import urllib.error; raise urllib.error.URLError('no host')",
            "failed (<urlopen error no host>)",
        ),
        ("open('/', 'w')", "Is a directory at '/'"),
        (
            "import sqlite3; raise sqlite3.OperationalError('disk I/O error')",
            "The response cache cannot be read or written",
        ),
        ("import sqlitedict; sqlitedict.SqliteDict('/dev')", "The response cache cannot be read or written"),
        (
            "os.environ['TMPDIR'] = '/no'; import tempfile; tempfile._candidate_tempdir_list = lambda: ['/no']; "
            "tempfile.TemporaryDirectory()",
            "No usable temporary directory found in ['/no']",
        ),
        (r"'\udcff'.encode()", r"file names in UTF-8, found b'\xff'"),
        (r"'a \ud800 b'.encode()", r"that UTF-8 can encode, found half a surrogate pair in 'a \ud800 b'"),
        ("raise MemoryError", "not enough memory for this command"),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB.')", "not enough memory for this command"),
        ("raise ImportError('x.so: failed to map segment from shared object')", "not enough memory for this command"),
        (
            "import tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())\n"
            "        with reporting_errors(): pass",
            "The current folder was deleted",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(body: str, words: str) -> None:
    code, said = ended(body)
    assert code == 1
    assert len(said) == 2
    assert words in said[0]


def test_arguments_that_are_no_utf_8_are_named_before_anything_is_done() -> None:
    code, said = ended("print('done', file=sys.stderr)", b"caf\xe9")
    assert (code, len(said)) == (1, 2)
    assert r"b'caf\xe9'" in said[0]


@pytest.mark.parametrize(
    "body",
    [
        *("print({})", "import logging; logging.warning({})", "raise UserError({})", "raise RuntimeError({})"),
        *("import warnings; warnings.warn({})", "import logging; logging.error('', exc_info=RuntimeError({}))"),
    ],
)
def test_what_acts_on_a_terminal_is_shown_by_its_number(body: str) -> None:
    said = "".join(words.decode() for words in started(body.format(ACTING)).communicate(timeout=600))
    assert r"\x1b]0;title\x07\u202eth\udcff\x9bgir" in said.replace(r"\\", "\\")
    assert [letter for letter in said if not letter.isprintable() and letter != "\n"] == []


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (r"print('\x1b[1;31mred\x1b[m\r')", "\x1b[1;31mred\x1b[m\r"),
        (r"print('\x1b[2J')", r"\x1b[2J"),
        (r"print('soft\xad \U0001f468\u200d\U0001f469')", "soft\xad \U0001f468\u200d\U0001f469"),
        (r"raise UserError('\x1b[31mred\r')", r"\x1b[31mred\r"),
    ],
)
def test_what_is_printed_may_have_colours_and_a_sentence_none(body: str, shown: str) -> None:
    assert shown in "".join(words.decode() for words in started(body).communicate(timeout=600))


def test_a_sign_that_the_encoding_of_the_output_lacks_is_shown_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert started(r"print('\u2193')").communicate(timeout=600)[0] == b"began\n\\u2193\n"


def test_a_log_s_fields_and_a_stream_that_is_read_only_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly:
        __slots__ = ("text",)

        def write(self, text: str) -> int:
            self.text = text
            return len(text)

    def traced(*arguments: Any) -> logging.LogRecord:
        record = logging.LogRecord(*arguments)
        record.trace = 7
        return record

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(traced)
    monkeypatch.setattr("sys.stdout", stream := ReadOnly())
    try:
        with reporting_errors():
            sys.stdout.write("a")
        make = logging.getLogRecordFactory()
        log_visibly()
        assert make is logging.getLogRecordFactory()
    finally:
        logging.setLogRecordFactory(before)
    made, broken = (make("a", 20, "", 1, text, ("\x1b",), None) for text in ("%s", "%d"))
    assert (stream.text, made.__dict__["trace"], made.msg, broken.args) == ("a", 7, r"\x1b", ("\x1b",))


def test_a_mistake_of_the_package_keeps_its_traceback() -> None:
    code, said = ended("{}['absent']")
    assert code == 1
    assert "Traceback (most recent call last):" in said


@pytest.mark.parametrize("body", ["print('x' * 10**6)", "print('x')", "time.sleep(0.5); print('x', flush=True)"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_pipe_is_silent(body: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    process = started(body)
    process.stdout.close()
    assert process.stderr.read() == b"cleaned up\n"
    assert process.wait(timeout=600) == 1


@pytest.mark.parametrize("arguments", [["tasks"], ["--help"], ["report", "--help"]])
def test_every_command_is_silent_where_nobody_reads(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sbeval", *arguments]
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=Path(sys.prefix), timeout=600)
    os.close(writer)
    assert found.stderr == b""


@pytest.mark.exhaustive
def test_a_signal_that_is_ignored_stays_ignored() -> None:
    process = started("signal.signal(signal.SIGHUP, signal.SIG_IGN)\n        with reporting_errors(): time.sleep(2)")
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=600)
    assert process.returncode == 0


@pytest.mark.exhaustive
def test_ctrl_c_while_the_command_s_own_modules_are_imported_is_silent() -> None:
    for module in ("sbeval.errors", "sbeval.plugin", "sbeval.processes.ending", "typer"):
        # a line for each module that has been imported
        command = [sys.executable, "-X", "importtime", "-m", "sbeval", "tasks"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        next(line for line in process.stderr if line.split()[-1] == module)
        process.send_signal(signal.SIGINT)
        said = [line for line in process.communicate(timeout=600)[1].splitlines() if "import time:" not in line]
        assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT), module
        assert said in ([], ["Ended by SIGINT; the same command can be run again."]), module


def test_an_error_of_three_parts_is_one_sentence() -> None:
    error = UserError.expected("a number", found=None, remedy="give one")
    assert str(error) == "Expected a number, found None: give one."
