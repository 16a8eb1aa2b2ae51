"""The bench: turns, percentiles, reasons, and figures against hand-worked numbers and torch."""

import dataclasses
import io
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from trtpipe.batching import Batching
from trtpipe.cli.main import main
from trtpipe.errors import Cancelled, InputError, MissingError
from trtpipe.evaluation import bench as evaluation_bench
from trtpipe.evaluation.bench import (
    Bench,
    BenchData,
    Mode,
    PeakMemory,
    Ready,
    Row,
    compare,
    cross_entropy,
    measure_modes,
)
from trtpipe.pipeline import bench as pipeline_bench
from trtpipe.progress import Silent, per_second
from trtpipe.report import bench_page
from trtpipe.values import DimRange, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
SCORES = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [0.0, 4.0]], np.float32)
LABELS = np.array([0, 1, 1, -1])
N = {"N": DimRange(1, 2, 4)}
HOW = Batching((TensorSpec("x", "float32", ("N", 2), N),), (TensorSpec("y", "float32", ("N", 2), N),), 2)


def data(reference=SCORES):
    return BenchData(lambda: ({"x": reference[k : k + 2]} for k in (0, 2)), {"y": reference}, LABELS, HOW)


class Clock:
    """A clock that modes move on by what they take."""

    def __init__(self):
        self.now = 0.0
        self.ran = []

    def mode(self, name, takes, answer=lambda a: {"y": a["x"]}, **more):
        def run():
            self.ran.append(name)
            self.now += (takes.pop(0) if isinstance(takes, list) else takes) / 1e3

        return Mode(name, "cpu", lambda: Ready(run, answer, 10, **more))

    def measure(self, modes, rounds=10, seconds=1e9, progress=None):
        time = SimpleNamespace(perf_counter=lambda: self.now, sleep=lambda _seconds: None)
        with mock.patch.object(evaluation_bench, "time", time):
            return measure_modes(
                modes, data(), batch=2, rounds=rounds, seconds=seconds, progress=progress or Silent()
            )  # fmt: skip


def test_modes_take_turns_after_warming_up_and_percentiles_are_of_the_timed_runs():
    clock = Clock()
    (slow, fast), rounds = clock.measure(
        [clock.mode("slow", [500.0] * 5 + list(range(1, 11))), clock.mode("fast", 2.0)]
    )
    assert rounds == 10
    assert clock.ran == ["slow", "fast"] * 15
    assert slow.median_ms == pytest.approx(5.5)
    assert slow.p90_ms == pytest.approx(9.1)
    assert slow.p99_ms == pytest.approx(9.91)
    assert slow.throughput == pytest.approx(2 / 5.5e-3)
    assert fast.median_ms == pytest.approx(2.0)


def test_what_the_making_of_a_mode_costs_another_is_not_timed():
    """To prepare PyTorch's INT8 mode empties the cache of what torch.compile made for the modes before it."""
    clock = Clock()
    compiled: set[str] = set()

    def prepare() -> Ready:
        compiled.clear()

        def run() -> None:
            clock.now += 0.001 if "compiled" in compiled else 1.0
            compiled.add("compiled")

        return Ready(run, lambda a: {"y": a["x"]}, 10)

    (row, _), _ = clock.measure([Mode("compiled", "cpu", prepare), Mode("int8", "cpu", prepare)])
    assert row.p99_ms == pytest.approx(1.0)


def test_what_was_opened_for_a_mode_is_closed_once_it_fails_or_all_are_timed():
    clock, log = Clock(), []
    broken = clock.mode("broken", 1.0, lambda a: 1 / 0, close=lambda: log.append("broken"))
    modes = [
        clock.mode("one", 1.0, close=lambda: log.append(f"one, timed {len(clock.ran)}")),
        broken,
        clock.mode("other", 1.0, close=lambda: log.append("other")),
    ]
    rows, rounds = clock.measure(modes)
    assert rows[1].skipped.startswith("ZeroDivisionError")
    assert log == ["broken", "other", f"one, timed {2 * (5 + rounds)}"]


def test_without_a_mode_that_runs_there_is_no_round():
    clock = Clock()
    assert clock.measure([])[1] == 0


def test_rounds_end_after_the_seconds_but_not_before_ten():
    clock = Clock()
    assert clock.measure([clock.mode("a", 1000.0)], rounds=50, seconds=3.0)[1] == 10
    assert clock.measure([clock.mode("a", 1000.0)], rounds=50, seconds=20.5)[1] == 21
    with pytest.raises(InputError, match=r"^bench: at least one round is needed \(got 0\)\. Raise --rounds\."):
        clock.measure([], rounds=0)


def test_a_mode_that_cannot_run_says_why_and_the_others_run():
    clock = Clock()

    def broken():
        raise RuntimeError("no kernel for this\nand more")

    modes = [Mode("a", "cpu", broken), Mode("b", "cuda", broken, cannot="no GPU here"), clock.mode("c", 1.0)]
    (a, b, c), _ = clock.measure(modes)
    assert a.skipped == "RuntimeError: no kernel for this"
    assert b.skipped == "no GPU here"
    assert a.median_ms is None
    assert c.skipped == ""
    assert c.median_ms == pytest.approx(1.0)


def test_a_mode_that_fails_while_it_is_timed_costs_its_own_row_alone():
    """On a full GPU it may be the hundredth run that finds no memory."""
    clock, times = Clock(), iter([0.25] * 4)

    def ms():
        if (found := next(times, None)) is None:
            raise MissingError("bench: cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY. Stop other programs on the GPU.")
        return found

    (engine, c), rounds = clock.measure([clock.mode("engine", 1.0, ms=ms), clock.mode("c", 1.0)])
    assert engine.skipped.startswith("bench: cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY.")
    assert engine.median_ms is None
    assert (c.median_ms, rounds) == (pytest.approx(1.0), 10)


def test_a_device_counts_its_own_milliseconds_and_memory():
    clock = Clock()
    made = clock.mode("engine", 1000.0, ms=lambda: 0.25, peak_memory_bytes=lambda: 77, notes=("CUDA events",))
    (row,), _ = clock.measure([made])
    assert (row.median_ms, row.peak_memory_bytes, row.notes) == (0.25, 77, ("CUDA events",))


def test_it_can_be_cancelled():
    class Impatient(Silent):
        def cancelled(self):
            return True

    clock = Clock()
    with pytest.raises(Cancelled):
        clock.measure([clock.mode("a", 1.0)], progress=Impatient())


def test_figures_against_hand_worked_numbers_and_torch():
    import torch

    found = SCORES.copy()
    found[3] = [5.0, 4.0]
    figures = compare({"y": SCORES}, {"y": found}, LABELS)
    assert figures["agreement"] == 0.75
    assert figures["agreement_interval"] == pytest.approx((0.19412, 0.99369), abs=1e-5)  # Clopper-Pearson, 3 of 4
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["max_abs"] == 5.0
    assert figures["sqnr_db"] == pytest.approx(10 * math.log10((4 + 1 + 9 + 1 + 16) / 25))
    expected = torch.nn.functional.cross_entropy(torch.tensor(found[:3]), torch.tensor(LABELS[:3]))
    assert figures["loss"] == pytest.approx(float(expected))


def test_labels_are_of_an_output_of_more_classes_than_they_number():
    """As in a check; the first output of scores may be of another head."""
    two, ten = SCORES[:, :2], np.eye(10, dtype=np.float32)[[9, 1, 2, 3]]
    labels = np.array([9, 1, 2, -1])
    figures = compare({"head": two, "classes": ten}, {"head": two[::-1], "classes": ten}, labels)
    assert (figures["agreement"], figures["accuracy"]) == (1.0, 1.0)
    alone = compare({"head": two}, {"head": two}, labels)
    assert alone["agreement"] == 1.0
    assert not alone.keys() & {"accuracy", "loss"}


def test_half_outputs_are_widened_before_the_softmax():
    scores = np.array([[60000.0, 59000.0, -60000.0]], np.float16)
    assert cross_entropy(scores, np.array([1])) == pytest.approx(float(scores[0, 0]) - float(scores[0, 1]))
    figures = compare({"y": scores.astype(np.float32)}, {"y": scores}, np.array([0]))
    assert figures["loss"] == 0.0
    assert figures["sqnr_db"] == math.inf


def test_nan_is_neither_agreement_nor_accuracy():
    found = SCORES.copy()
    found[0, 0] = np.nan
    figures = compare({"y": SCORES}, {"y": found}, LABELS)
    assert figures["agreement"] == 0.75
    assert figures["accuracy"] == pytest.approx(1 / 3)
    assert figures["sqnr_db"] == -math.inf


def test_a_missing_output_is_an_error():
    with pytest.raises(InputError, match=r"outputs: must be y \(got z\)"):
        compare({"y": SCORES}, {"z": SCORES}, None)


# In a process of its own: what other tests left resident may go while this one counts.
HELD_AND_LET_GO = """
import numpy as np
from trtpipe.evaluation.bench import PeakMemory
peak = PeakMemory()
block = np.ones(64 << 20, np.uint8)
del block
print(peak.bytes(), PeakMemory().bytes())
"""


def test_peak_memory_sees_what_was_held_and_let_go():
    if PeakMemory().bytes() is None:
        pytest.skip("this system does not tell a process's peak memory")
    done = subprocess.run([sys.executable, "-c", HELD_AND_LET_GO], check=True, capture_output=True, text=True)
    held, later = (int(word) for word in done.stdout.split())
    assert (48 << 20) < held < (120 << 20)
    assert later < (32 << 20)


# the page

ROWS = (
    Row("eager FP32", "cpu", "", 2.0, 2.5, 3.0, 4000.0, 0.1, 0.99, 1.0, (0.99, 1.0), math.inf, 0.0, 2_000_000, 1 << 20),
    Row("half", "cpu", "", 1.0, 1.5, 2.0, 8000.0, None, None, None, None, 40.0, 0.5, 1_000_000, None, ("a note",)),
    Row("engine", "cuda", "no GPU executes an engine here: none"),
)
BENCH = Bench("net", 8, 64, 100, 5, "eager FP32", 2, ROWS, {"python": "3.11", "torch": "2.14", "rich": "1"}, ("hm",))


def test_the_page_is_the_table_and_the_reasons():
    assert bench_page.markdown(BENCH) == (
        "# Bench: net\n\n"
        "Batch 8; 100 rounds after 5 warm-up runs, each of every mode in turn; 64 samples compared with eager FP32; "
        "2 CPU cores; python 3.11, torch 2.14.\n\n"
        "| mode | median ms | p90 ms | p99 ms | samples/s | loss | accuracy | agreement | SQNR dB | size MB "
        "| peak memory MB |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| eager FP32 | 2.000 | 2.500 | 3.000 | 4,000 | 0.1000 | 0.9900 | 1.0000 | inf | 2.000 | 1.0 |\n"
        "| half | 1.000 | 1.500 | 2.000 | 8,000 |  |  |  | 40.0 | 1.000 |  |\n\n"
        "- half: a note\n\n"
        "Not run here:\n\n- engine: no GPU executes an engine here: none\n\n"
        "Note: hm\n"
    )


def test_json_comes_back_as_it_was(tmp_path):
    file = tmp_path / "b.json"
    file.write_text(bench_page.bench_text(BENCH))
    assert bench_page.read_bench(file) == BENCH


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[",
        "[" * 100_000,
        "\x00",
        '{"name": 1}',
        bench_page.bench_text(BENCH).replace("{\n", '{\n "extra": 1,\n', 1),
    ],
)
def test_other_json_is_refused(tmp_path, text):
    file = tmp_path / "b.json"
    file.write_text(text)
    with pytest.raises(
        InputError,
        match=r"b\.json: (must be JSON of `trtpipe bench --save` \(got .*\)|"
        r"was not written by `trtpipe bench --save` of this version)\. Measure again\.",
    ):
        bench_page.read_bench(file)


def test_csv_has_a_line_for_each_mode():
    lines = bench_page.table_csv(BENCH).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("name,device,skipped,median_ms,p90_ms")
    assert lines[1].startswith("eager FP32,cpu,,2.0,2.5,3.0,4000.0")
    assert lines[1].endswith(",0.99,1.0,8,100")


def test_the_plot_is_written_and_other_suffixes_refused(tmp_path):
    bench_page.plot(BENCH, tmp_path / "b.svg")
    assert "<svg" in (tmp_path / "b.svg").read_text()
    with pytest.raises(InputError, match=r"b\.jpg: must end in \.png or \.svg \(got \.jpg\)\."):
        bench_page.plot(BENCH, tmp_path / "b.jpg")


def test_the_command_shows_a_saved_bench_again(tmp_path, capsys):
    file = tmp_path / "b.json"
    file.write_text(bench_page.bench_text(BENCH))
    assert main(["bench", str(file), "--csv", str(tmp_path / "b.csv"), "--save", str(tmp_path / "c.json")]) == 0
    assert capsys.readouterr().out == bench_page.markdown(BENCH)
    assert (tmp_path / "b.csv").read_text() == bench_page.table_csv(BENCH)
    assert (tmp_path / "c.json").read_text() == file.read_text()


def test_a_target_that_is_nothing_is_refused(tmp_path, capsys):
    assert main(["bench", str(tmp_path)]) == 2
    assert "must be a job file or a bundle (got a folder)" in capsys.readouterr().err


def test_the_docs_page_is_what_its_json_gives():
    found = bench_page.read_bench(ROOT / "docs" / "bench.json")
    assert (ROOT / "docs" / "bench.md").read_text() == bench_page.markdown(found)
    assert sum(not r.skipped for r in found.rows) >= 8


class Terminal(io.StringIO):
    """What stdout is in a terminal."""

    def isatty(self):
        return True


def test_a_terminal_gets_columns_and_a_file_markdown(tmp_path, monkeypatch):
    saved = tmp_path / "bench.json"
    saved.write_text(bench_page.bench_text(BENCH))
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["bench", str(saved)]) == 0
    text = shown.getvalue()
    assert text == bench_page.terminal(BENCH)
    assert "|" not in text
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("mode "))
    titles = bench_page._table(BENCH)[0]
    for title in titles[1:]:  # each column ends where its title ends
        end = lines[at].index(title) + len(title)
        assert lines[at + 1][end - 1] != " ", title


@pytest.mark.parametrize("rate", [1e-4, 0.004, 0.04, 0.4, 0.6, 4.0, 9.4, 9.6, 44.4, 4444.0, 1e7])
def test_a_rate_is_never_nothing(rate):
    """A mode that takes minutes a batch has a rate too."""
    said = per_second(rate)
    assert float(said.replace(",", "")) == pytest.approx(rate, rel=0.06)
    row = Row("slow", "cpu", median_ms=1.0, throughput=rate)
    bench = dataclasses.replace(BENCH, rows=(row,))
    for text in (bench_page.markdown(bench), bench_page.terminal(bench)):
        assert said in text


@pytest.mark.parametrize(
    ("load", "cores", "busy"), [(None, 2, False), (3.0, 2, False), (3.1, 2, True), (0.5, 1, False)]
)
def test_a_busy_machine_is_a_note(load, cores, busy):
    note = f"load average {load} on {cores} cores: latencies are unreliable. Compare sizes and outputs"
    assert pipeline_bench.busy(load, cores) == ((note,) if busy else ())
