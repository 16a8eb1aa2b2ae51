"""Whatever ends the process of a command, the exit code is success only where the command reached its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import trtpipe
from trtpipe.cli.interrupts import STOPPING
from trtpipe.errors import BUG, Cancelled, MissingError

CALLED = (
    "trtpipe: the process ended before the command did (exit code {}): code of the job, or a library, called os._exit, "
    "exec or exit(). Take that call out.\n"
)
KILLED = (
    "trtpipe: the process was ended by SIGKILL. The system does so when memory runs out: reduce the batch sizes, or "
    "how much runs at once.\n"
)
CRASHED = (
    "trtpipe: the process was ended by SIGSEGV. A library has crashed: run it again with PYTHONFAULTHANDLER=1 to see "
    "where.\n"
)
STOPPED = "interrupted: the process was ended by SIGSEGV while it stopped.\n"
#: What a command may do -> the exit code and stderr of the program.
ENDS = {
    "return 0": (0, ""),
    "return 4": (4, ""),
    "os._exit(0)": (2, CALLED.format(0)),
    "os._exit(3)": (2, CALLED.format(3)),
    "ctypes.CDLL(None)._exit(0)": (2, CALLED.format(0)),
    "ctypes.CDLL(None).exit(0)": (2, CALLED.format(0)),
    "os.execv('/bin/true', ['true'])": (2, CALLED.format(0)),
    "threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(20)": (2, CALLED.format(0)),
    "atexit.register(os._exit, 0); return 1": (1, ""),
    "atexit.register(os._exit, 5); return 0": (5, ""),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, KILLED),
    "ctypes.string_at(0)": (139, CRASHED),
    "signal.signal(15, lambda *_: ctypes.string_at(0)); os.kill(os.getppid(), 15); time.sleep(20)": (130, STOPPED),
    "os.kill(os.getpid(), signal.SIGINT); return 3": (130, ""),
    # Sent to both processes, the second comes at any moment: also where nothing treats it any more.
    "os.kill(os.getpid(), signal.SIGTERM)": (130, ""),
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)": (130, ""),
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGHUP)": (130, ""),
    # A process that the command leaves behind keeps nothing waiting.
    "subprocess.Popen(['sleep', '20'], close_fds=False, stdout=-3, stderr=-3); os._exit(0)": (2, CALLED.format(0)),
}  # fmt: skip
PROGRAM = """
import atexit, ctypes, os, signal, subprocess, sys, threading, time
from trtpipe.cli.supervised import supervised

def command():
    try:
        {}
    except KeyboardInterrupt:
        return 130

sys.exit(supervised(command))
"""


def program(statement: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(statement), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("statement", ENDS)
def test_the_exit_code_is_the_one_that_the_command_reached(statement: str) -> None:
    done = program(statement)
    assert (done.returncode, done.stderr, done.stdout) == (*ENDS[statement], "")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_closed_standard_streams_are_not_the_way_back_to_the_parent(closed: tuple[int, ...]) -> None:
    """What is printed to descriptor 1 would be an exit code there."""
    statement = "assert all(os.path.exists(f'/proc/self/fd/{n}') for n in range(3)); "
    statement += "[os.write(n, b'9') for n in (1, 2)]; print('log', file=sys.stderr); return 4"
    filled = "import os\nfrom trtpipe.cli.results import fill_closed_streams\nfill_closed_streams()\n"
    shell = f'exec "$@" {" ".join(f"{n}>&-" for n in closed)}'
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", filled + PROGRAM.format(statement)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 4
    assert done.stdout == (b"" if 1 in closed else b"9")
    assert done.stderr == (b"" if 2 in closed else b"9log\n")


@pytest.mark.parametrize("closed", [(2,), (0, 2), (0,)])
def test_a_command_gives_its_results_whatever_else_is_closed(closed: tuple[int, ...]) -> None:
    command = [sys.executable, "-m", "trtpipe", "schema"]
    shell = f'exec "$@" {" ".join(f"{n}>&-" for n in closed)}'
    done = subprocess.run(["sh", "-c", shell, "sh", *command], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["title"]


def test_where_no_process_can_be_begun_the_command_runs_without_one() -> None:
    statement = "return 0 if os.getpid() == parent else 1"
    patched = "import os\nparent = os.getpid()\ndef fork(): raise BlockingIOError('no more')\nos.fork = fork\n"
    done = subprocess.run([sys.executable, "-c", patched + PROGRAM.format(statement)], timeout=60, check=False)
    assert done.returncode == 0


def test_nor_can_its_end_not_be_interrupted() -> None:
    """What Python still calls may take for ever."""
    patched = "import os, atexit, signal, time\ndef fork(): raise BlockingIOError('no more')\nos.fork = fork\n"
    patched += (
        "def late(): time.sleep(0.4); signal.raise_signal(signal.SIGINT); time.sleep(60)\natexit.register(late)\n"
    )
    patched += "from trtpipe.cli.main import _interrupt, interrupted_by\n"
    statement = "with interrupted_by(_interrupt, last=True): pass\n        return 4"
    done = subprocess.run([sys.executable, "-c", patched + PROGRAM.format(statement)], timeout=30, check=False)
    assert done.returncode == 4


def test_a_machine_reads_the_same() -> None:
    done = program("os._exit(0)", "--json")
    assert json.loads(done.stdout) == {"error": CALLED.format(0)[:-1], "exit_code": 2}


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("whom", ["parent", "group"])
def test_an_interrupt_reaches_the_command(number: signal.Signals, whom: str) -> None:
    # A signal that strikes right before a long sleep would be seen at its end only.
    statement = "with interrupted_by(_interrupt):\n"
    statement += "            print('ready', flush=True); [time.sleep(0.05) for _ in range(1200)]"
    imported = "from trtpipe.cli.main import _interrupt, interrupted_by"
    command = [sys.executable, "-c", f"{imported}\n{PROGRAM.format(statement)}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (os.killpg if whom == "group" else os.kill)(process.pid, number)
        assert process.wait(timeout=30) == 130


@pytest.mark.parametrize("number", STOPPING)
def test_native_code_that_answers_no_signal_is_ended_some_time_after_the_second(number: signal.Signals) -> None:
    imported = "import trtpipe.cli.supervised\nfrom trtpipe.cli.main import _interrupt, interrupted_by\n"
    imported += "trtpipe.cli.supervised.PATIENCE_S = 0.5"
    statement = "with interrupted_by(_interrupt): print('ready', flush=True); sum(range(10**12))"
    command = [sys.executable, "-c", f"{imported}\n{PROGRAM.format(statement)}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(1)  # until it is in native code
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said.decode()) == (130, STOPPED.replace("SIGSEGV", "SIGKILL"))


@pytest.mark.parametrize("code", [0, 1, 2])
def test_an_interrupt_after_the_work_changes_no_exit_code(code: int) -> None:
    """A command comes to its last lines before its process is prepared for its end."""
    strikes = "signal.raise_signal(signal.SIGINT); time.sleep(0.4); signal.raise_signal(signal.SIGTERM)"
    imported = "import signal\nfrom trtpipe.cli.main import _interrupt, interrupted_by\n"
    statement = f"with interrupted_by(_interrupt, last=True): pass\n        {strikes}; return {code}"
    command = [sys.executable, "-c", imported + PROGRAM.format(statement)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (code, "", "")


def test_a_killed_program_leaves_no_command_behind() -> None:
    statement = "print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", PROGRAM.format(statement)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert child != process.pid
        process.kill()
        process.wait(timeout=30)
        assert process.stdout.read() == b""  # the child's end of the pipe is closed: it has ended


@pytest.mark.parametrize("place", ["at import", "in the factory"])
def test_a_build_is_no_success_without_its_bundle(tmp_path: Path, place: str) -> None:
    statement = "import os\nos._exit(0)\n" if place == "at import" else "import os\n"
    (tmp_path / "ends.py").write_text(f"{statement}def build():\n    os._exit(0)\n")
    np.save(tmp_path / "x.npy", np.zeros((4, 4), np.float32))
    job = {
        "name": "ends",
        "model": {"factory": "ends:build"},
        "inputs": {"x": {"shape": [1, 4]}},
        "outputs": {"y": {}},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npy"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "trtpipe", "build", "job.yaml", "-o", "out", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (2, [CALLED.format(0)[:-1]])
    assert not (tmp_path / "out" / "ends").exists()


#: Begins the program, and sends itself a signal when it comes to import a module.
STARTS = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Finder())
sys.argv = ["trtpipe", "--version"]
from trtpipe.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("module", ["trtpipe.cli", "click", "trtpipe.errors", "trtpipe.cli.console"])
def test_an_interrupt_while_the_program_is_imported_ends_it_as_a_later_one_does(
    module: str, number: signal.Signals
) -> None:
    program = STARTS.format(module=module, number=int(number))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_an_interrupt_that_is_ignored_stays_so_while_the_program_is_imported() -> None:
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program += STARTS.format(module="click", number=int(signal.SIGINT))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"trtpipe {trtpipe.__version__}\n")


def test_the_installed_program_is_that_one() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert '[project.scripts]\ntrtpipe = "trtpipe.__main__:main"\n' in project.read_text()


def test_what_the_program_repeats_is_what_the_modules_define() -> None:
    """It needs exit codes and signals before those may be imported."""
    script = (
        "import trtpipe.__main__ as program\n"
        "print(program._MISSING, program._BUG, program._INTERRUPTED, *map(int, program._STOPPING))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    defined = (MissingError.exit_code, BUG, Cancelled.exit_code, *STOPPING)
    assert [int(word) for word in done.stdout.split()] == list(defined)


def test_a_process_of_multiprocessing_keeps_its_handlers() -> None:
    """It imports the module of the program, and never calls main()."""
    script = (
        "import multiprocessing.spawn, signal\nbefore = signal.getsignal(signal.SIGTERM)\nimport trtpipe.__main__\n"
        "assert signal.getsignal(signal.SIGTERM) is before\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0
