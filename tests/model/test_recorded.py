"""Calls recorded and replayed, with a recorder that keeps the call itself; tests/gpu has the one of CUDA."""

import pytest
import torch

from trtpipe.model import recorded
from trtpipe.model.recorded import Recordings, replayed


class Recorder:
    """Records as CUDA does: nothing is computed while it records, and a replay has the recorded memory as its input."""

    def __init__(self, broken=False):
        self.recorded, self.replays, self._broken = 0, 0, broken

    def __call__(self, run, inputs):
        if self._broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1

        def replay():
            self.replays += 1
            run(*inputs)

        return replay, None


def sums(run_of, calls):
    """What runs of these inputs add up to, by their shapes."""
    seen = {}

    def run(inputs):
        (x,) = inputs
        seen.setdefault(tuple(x.shape), []).append(float(x.sum()))

    made = run_of(run)
    for x in calls:
        made((x,))
    return seen


@pytest.mark.parametrize("broken", [False, True])
def test_each_call_is_made_once_whatever_is_recorded(broken, monkeypatch):
    recorder, generator = Recorder(broken), torch.Generator().manual_seed(0)
    calls = [torch.randn(size, 3, generator=generator) for size in (4, 4, 4, 4, 4, 2, 4, 4, 2)]
    monkeypatch.setattr(recorded, "record", recorder)
    assert sums(Recordings, calls) == sums(lambda run: run, calls)
    assert (recorder.recorded, recorder.replays) == ((0, 0) if broken else (2, 7))


def test_what_is_given_may_change_afterwards(monkeypatch):
    recorder, x = Recorder(), torch.zeros(2)
    monkeypatch.setattr(recorded, "record", recorder)
    seen = []
    recordings = Recordings(lambda inputs: seen.append(float(inputs[0].sum())))
    for value in (1.0, 2.0, 3.0):
        recordings((x.fill_(value),))
    assert seen == [2.0, 4.0, 6.0]
    assert recorder.replays == 2


def test_a_cpu_runs_as_it_is():
    run = [].append
    with replayed(run, "cpu") as same:
        assert same is run


def test_memory_is_given_back_whatever_ends_the_block():
    opened = replayed(lambda inputs: None, "cuda:0")
    recordings = opened.__enter__()
    recordings._made["x"] = ((), lambda: None)
    assert not opened.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert recordings._made == {}
