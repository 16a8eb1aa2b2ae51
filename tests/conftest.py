"""For every test: nothing of whoever runs them reaches what they run."""

import os
import signal

# A shell that runs the tests in the background has interrupts ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A make run by a test says so when another make runs the tests.
for _name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
    os.environ.pop(_name, None)
