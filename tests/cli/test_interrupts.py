"""An interrupt waits for a native module that is being imported, and for nothing else."""

import signal
import subprocess
import sys

import pytest

from trtpipe.cli.interrupts import STOPPING

#: A signal at the first call of a Python function below the import of `module`, and what becomes of it.
PROGRAM = """
import signal, sys, time
from trtpipe.cli.interrupts import interrupted_by

def interrupt(number, frame):
    raise KeyboardInterrupt

def below(frame):
    while frame is not None:
        if {below}:
            return True
        frame = frame.f_back
    return False

def profile(frame, event, arg):
    if event == "call" and not frame.f_code.co_filename.startswith("<frozen importlib") and below(frame):
        sys.setprofile(None)
        print("struck", flush=True)
        signal.raise_signal({number})

try:
    with interrupted_by(interrupt):
        sys.setprofile(profile)
        import {module}
        print("imported", flush=True)
        time.sleep(10)
except KeyboardInterrupt:
    print("interrupted")
"""
NATIVE = 'getattr(frame.f_locals.get("self"), "name", None) == "onnx.onnx_cpp2py_export"'


@pytest.mark.parametrize("number", STOPPING)
def test_a_native_module_is_imported_to_its_end(number):
    """onnx's module calls Python while it initializes itself, and ends the process when that raises."""
    program = PROGRAM.format(below=NATIVE, number=int(number), module="onnx")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["struck", "imported", "interrupted"] or done.stdout.split() == [
        "struck",
        "interrupted",  # in the rest of the import, which is Python
    ]


def test_any_other_module_is_interrupted_where_it_is():
    below = 'frame.f_globals.get("__name__") == "colorsys"'
    program = PROGRAM.format(below=below, number=int(signal.SIGTERM), module="colorsys")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["struck", "interrupted"]), done.stderr


#: What Python calls at a process' end, struck by the twin of the signal that ended it, and by one that came later.
ENDING = """
import atexit, signal, time
from trtpipe.cli.interrupts import end_with, interrupted_by

def interrupt(number, frame):
    raise KeyboardInterrupt

def late():
    signal.raise_signal({number})
    print("twin", flush=True)
    time.sleep(0.4)
    signal.raise_signal({number})
    print("never")

atexit.register(late)
try:
    with interrupted_by(interrupt, last=True):
        signal.raise_signal({number})
        time.sleep(10)
except KeyboardInterrupt:
    print("interrupted", flush=True)
signal.raise_signal({number})
time.sleep(0.4)
signal.raise_signal({number})
print("code", flush=True)
end_with({code})
"""


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("code", [0, 1, 130])
def test_an_end_is_not_interrupted_with_a_traceback(code, number):
    """A terminal's Ctrl-C reaches both processes of a command, of which one passes it on: it comes twice. Whenever it
    comes, the code is the one that the command reached."""
    program = ENDING.format(number=int(number), code=code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (code, ["interrupted", "code", "twin"], "")
