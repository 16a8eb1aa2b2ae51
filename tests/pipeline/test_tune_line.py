"""Tuning a real network that INT8 cannot hold: what is named, what is kept, and that the written job does the same."""

import dataclasses
import json
from types import SimpleNamespace

import hard
import hard_jobs
import numpy as np
import pytest

from calib.table import CalibrationTable
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.job.dump import job_text
from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.kit import write_kit
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.tune import _algorithm, _Bench, chosen, tune_from
from trtpipe.progress import Silent
from trtpipe.quantization.ranking import ModuleSensitivity, Sensitivity
from trtpipe.quantization.search import Candidate, Trial
from trtpipe.quantization.trials import Trials
from trtpipe.values import Metric

BUDGET = "{sqnr_db_min: 30}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hard")


@pytest.fixture(scope="module")
def path(folder):
    return hard_jobs.write(folder, limits=BUDGET, fp16="true")


@pytest.fixture(scope="module")
def tuned(folder, path):
    """Exit code of `trtpipe tune`."""
    return main(["tune", str(path), "-o", str(folder / "out"), "-q"])


def value(report, name):
    return next(m.value for m in report.metrics if m.name == name)


def test_a_failed_build_names_the_worst_module_with_its_line(path, tmp_path, capsys):
    assert main(["build", str(path), "-o", str(tmp_path), "-q"]) == 1
    said = capsys.readouterr().out
    assert "hard: FAILED" in said
    assert f"problem: worst quantized modules: {hard.WORST} (hard.py:" in said
    assert "Keep the first in precision.keep.fp16, or run `trtpipe tune`." in said


def test_tune_keeps_only_the_worst_module_and_meets_the_budget(folder, tuned, path):
    assert tuned == 0
    job = read_job(path.with_name("job.tuned.yaml"))
    assert job.precision.keep.fp16 == (hard.WORST,)
    assert job.precision.keep.fp32 == ()
    file = json.loads((folder / "out" / "hard.trials.json").read_text())
    assert len(file["trials"]) <= 10
    assert [t["passed"] for t in file["trials"]] == [False, True]
    assert "budget met: `layer2.0.conv2` in half" in (folder / "out" / "hard.trials.md").read_text()


def test_the_written_job_gives_the_same_result(folder, tuned, path, tmp_path):
    built = build(read_job(path.with_name("job.tuned.yaml")), tmp_path, Silent())
    file = json.loads((folder / "out" / "hard.trials.json").read_text())
    found = {m["name"]: m["value"] for m in file["trials"][-1]["metrics"]}
    assert built.report.passed
    assert value(built.report, "sqnr_db") == pytest.approx(found["sqnr_db"], rel=1e-6)
    kept = [la for la in built.bundle.manifest.layers if la.module == hard.WORST]
    assert [la.precision for la in kept] == ["fp16"]
    assert (built.bundle.path / "model.onnx").stat().st_size == file["trials"][-1]["size_bytes"]


@pytest.mark.parametrize(
    "candidate", [Candidate("minmax"), Candidate("percentile"), Candidate("auto", half=(hard.WORST,))]
)
def test_a_trial_is_what_a_build_of_its_job_gives(path, tmp_path, candidate):
    """With corrections, which are fitted to the thresholds of the algorithm, and to what is in INT8."""
    from trtpipe.pipeline import stages as line
    from trtpipe.pipeline.tune import _Bench

    job = read_job(path, ["calibration.corrections=true"])
    stages = line.Stages(Silent())
    prepared = line.prepare(job, stages)
    table = line.calibrate(job, prepared, stages)
    assert table.corrections.steps
    trial = _Bench(job, prepared, table, stages).evaluate(candidate)
    built = build(chosen(job, candidate), tmp_path, Silent(), diagnose_seconds=0)
    assert [m.value for m in built.report.metrics] == [m.value for m in trial.metrics]
    again = line.recalibrated(chosen(job, candidate), prepared, table, job, stages)
    assert again.digest == CalibrationTable.load(built.bundle.path / "calibration.json").digest


def test_a_second_run_takes_up_the_trials_and_evaluates_nothing(folder, tuned, path, monkeypatch, capsys):
    import trtpipe.pipeline.tune

    def refuse(*_):
        raise AssertionError("evaluated again")

    monkeypatch.setattr(trtpipe.pipeline.tune._Bench, "evaluate", refuse)
    monkeypatch.setattr(trtpipe.pipeline.tune._Bench, "rank", refuse)
    before = (folder / "out" / "hard.trials.json").read_bytes()
    assert main(["tune", str(path), "-o", str(folder / "out")]) == 0
    assert "hard.trials.json: 2 trials of an earlier run were taken up" in capsys.readouterr().err
    assert (folder / "out" / "hard.trials.json").read_bytes() == before


def test_build_with_on_fail_tune_does_it_in_one_go(folder, tuned, path):
    job = read_job(path, ["check.on_fail=tune"])
    built = build(job, folder / "out", Silent())
    assert built.report.passed
    assert built.bundle.manifest.precision.keep.fp16 == (hard.WORST,)
    assert any(n.startswith("check.on_fail: tune: budget met: `layer2.0.conv2` in half") for n in built.report.notes)


def test_prepare_with_on_fail_tune_gives_a_kit_that_is_tuned(folder, tuned, path, tmp_path):
    (tmp_path / "hard.trials.json").write_bytes((folder / "out" / "hard.trials.json").read_bytes())
    kit = write_kit(read_job(path, ["check.on_fail=tune"]), tmp_path, Silent())
    assert kit.report.passed
    assert kit.bundle.manifest.kind == "kit"
    assert kit.bundle.manifest.precision.keep.fp16 == (hard.WORST,)
    assert any(n.startswith("check.on_fail: tune: budget met: `layer2.0.conv2` in half") for n in kit.report.notes)


def test_the_modes_of_a_bundle_are_timed_on_its_golden_data(folder, tuned, path, capsys):
    """Without torch and without the job: its graph in ONNX Runtime."""
    bundle = build(read_job(path.with_name("job.tuned.yaml")), folder / "benched", Silent()).bundle.path
    capsys.readouterr()
    assert main(["bench", str(bundle), "--rounds", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {r["name"]: r for r in found["rows"]}
    graph = by_name["ONNX Runtime, the bundle's graph"]
    assert graph["median_ms"] > 0
    assert graph["size_bytes"] == (bundle / "model.onnx").stat().st_size
    assert 30 < graph["sqnr_db"] < 80  # held against the baseline's outputs, which are FP32
    assert by_name["engine"]["skipped"] == "the target is onnxruntime: there is no engine"
    assert main(["bench", str(bundle), "--set", "name=x"]) == 2


def test_a_trial_has_the_engines_latency_where_a_gpu_executes_it(path, monkeypatch):
    """The GPU and its clock are doubles; that one is asked for only with a target that has engines."""
    from trtpipe.pipeline import tune as tune_line
    from trtpipe.pipeline.stages import Stages, calibrate, prepare
    from trtpipe.trt import driver

    compiled, whole = [], SimpleNamespace(fallback=())
    monkeypatch.setattr(driver, "probe", lambda: SimpleNamespace(devices=("a GPU",), problem=""))
    monkeypatch.setattr(tune_line, "compile_engine", lambda job, *_: compiled.append(job.build.target) or whole)
    monkeypatch.setattr(tune_line, "not_executed_here", lambda engine: "")
    monkeypatch.setattr(tune_line, "latencies", lambda prepared, engine: (3.0, 1.0, 2.0))
    for target, expected in (("onnxruntime", None), ("tensorrt_rtx", 2.0)):
        job = read_job(path, [f"build.target={target}"])
        stages = Stages(Silent())
        prepared = prepare(job, stages)
        bench = tune_line._Bench(job, prepared, calibrate(job, prepared, stages), stages)
        assert bench.latency_ms(job, None) == expected
    assert compiled == ["tensorrt_rtx"]


def test_latencies_of_another_engine_are_not_taken_up(path, monkeypatch):
    """Where a GPU gives them, which is a double here."""
    from trtpipe.pipeline.stages import Stages, calibrate, prepare
    from trtpipe.pipeline.tune import _Bench
    from trtpipe.trt import driver

    def key(*options):
        job = read_job(path, ["build.target=tensorrt_rtx", *options])
        return _Bench(job, prepared, table, stages).key()

    stages = Stages(Silent())
    prepared = prepare(read_job(path), stages)
    table = calibrate(read_job(path), prepared, stages)
    assert key() == key("build.optimization_level=5") == key("build.log_level=info")
    monkeypatch.setattr(driver, "probe", lambda: SimpleNamespace(devices=(SimpleNamespace(name="a GPU"),), problem=""))
    assert key() == key("build.log_level=info")
    assert key() != key("build.optimization_level=5")
    assert "tensorrt-rtx" in key()["builder"]


def test_a_budget_out_of_reach_exits_with_1_and_still_writes_the_closest(folder, path, tmp_path, capsys):
    target = folder / "closest.yaml"  # beside the code
    options = ["-q", "--evaluations", "2", "--set", "check.limits={sqnr_db_min: 200}"]
    code = main(["tune", str(path), "-o", str(tmp_path), "--write", str(target), *options])
    said = capsys.readouterr().out
    assert code == 1
    assert "budget NOT met; closest: " in said
    assert "(limit 200)" in said
    assert "the search ended at its 2 evaluations" in said
    assert (tmp_path / "hard.trials.md").is_file()
    assert hard.WORST in read_job(target).precision.keep.fp16


def test_tune_needs_qdq_and_a_limit(path):
    job = read_job(path)
    refused = {
        "precision={}": "tune: the job turns on no mode that quantizes. Set precision.int8_mode or fp8_mode.",
        "build={target: tensorrt, quantization: implicit}": "tune: build.quantization must be explicit, where "
        "trtpipe places the Q/DQ (got implicit). Leave it out.",
    }
    for setting, message in refused.items():
        with pytest.raises(InputError) as caught:
            tune_from(read_job(path, [setting]), None, None, path.parent, None)
        assert str(caught.value) == message
    none = job.model_copy(
        update={
            "check": job.check.model_copy(update={"limits": job.check.limits.model_copy(update={"sqnr_db_min": None})})
        }
    )
    with pytest.raises(InputError, match=r"^tune: check\.limits sets no accuracy budget\. Add one, like"):
        tune_from(none, None, object(), path.parent, None)


def test_a_candidate_adds_to_what_the_job_keeps_and_bf16_has_its_own_list(path):
    job = read_job(path, ["precision.keep={fp32: [head]}"])
    found = chosen(job, Candidate("mse", ("a",), ("b",)))
    assert found.precision.keep.fp32 == ("head", "b")
    assert found.precision.keep.fp16 == ("a",)
    assert found.calibration.algorithm == "mse"
    job = read_job(path, ["precision={bf16_mode: true, int8_mode: true}", "build.target=tensorrt_rtx"])
    assert chosen(job, Candidate("minmax", ("a",))).precision.keep.bf16 == ("a",)


def test_a_format_that_is_chosen_comes_after_the_jobs_own_globs(path):
    """The last glob that fits decides."""
    modes = "precision={int8_mode: true, fp8_mode: true, formats: {head: int8, '*': int8}}"
    job = read_job(path, [modes, "build.target=tensorrt_rtx"])
    moved = chosen(job, Candidate("mse", fp8=("head",), int8=("stem",))).precision.formats
    assert list(moved.items()) == [("*", "int8"), ("head", "fp8"), ("stem", "int8")]


@pytest.mark.parametrize(("named", "first"), [(None, "auto"), ("t.json", "minmax")])
def test_what_auto_has_chosen_is_still_auto_to_the_job(path, named, first):
    """Its table may say that the exact maxima were better; the job that is written chooses again."""
    job = read_job(path)
    calibration = job.calibration.model_copy(update={"algorithm": "auto", "table": named})
    job = job.model_copy(update={"calibration": calibration})
    found = _algorithm(job, SimpleNamespace(algorithm="minmax"))
    assert found == first
    assert chosen(job, Candidate(found)).calibration == calibration


def test_a_percentile_is_dropped_with_its_algorithm(path):
    job = read_job(path, ["calibration.algorithm=percentile", "calibration.percentile=99.0"])
    assert chosen(job, Candidate("percentile")).calibration.percentile == 99.0
    again = load_with_text(job_text(chosen(job, Candidate("mse")), path.parent), path)
    assert again.calibration.algorithm == "mse"


def test_a_table_stays_what_it_was_made_as(path):
    """Beside one, `auto` is whatever algorithm and percentile that was."""
    job = read_job(path)
    job = job.model_copy(update={"calibration": job.calibration.model_copy(update={"table": "t.json"})})
    assert chosen(job, Candidate("percentile", ("a",))).calibration == job.calibration


def load_with_text(text, path):
    target = path.with_name("again.yaml")
    target.write_text(text)
    return read_job(target)


def test_a_job_written_elsewhere_reads_back_as_the_same_job(path, tmp_path):
    job = read_job(path, ["build={target: tensorrt_rtx, compute_capability: ['8.6', '12.0']}"])
    target = tmp_path / "deep" / "er" / "x.yaml"
    target.parent.mkdir(parents=True)
    target.write_text(job_text(job, target.parent))
    assert read_job(target).model_dump() == job.model_dump()
    assert str(path.parent) not in target.read_text()


def test_trials_depend_on_the_labels(path):
    """They are taken up again where all is the same; with other labels accuracies are others."""
    job, stages = read_job(path), Stages(Silent())
    prepared = PreparedJob(job, stages)
    recorded = prepared._recorded
    keys = []
    for labels in (None, np.array([0, 1, 2]), np.array([0, 2, 1])):
        baseline = dataclasses.replace(recorded.baseline, labels=labels)
        prepared.__dict__["_recorded"] = dataclasses.replace(recorded, baseline=baseline)
        keys.append(_Bench(job, prepared, None, stages).key())
    assert len({key["labels"] for key in keys}) == 3
    assert len({json.dumps(key | {"labels": ""}) for key in keys}) == 1


# the file of trials

METRIC = Metric("sqnr_db", "y", float("inf"), 30.0, True)
TRIAL = Trial(Candidate("mse", ("a",)), True, -0.5, (METRIC,), (), 0.5, 10)
RANKING = Sensitivity((ModuleSensitivity("a", "n.py:1", "conv2d", -float("inf"), 3.0, None, 4),), 32, 4, 1.0, 1.0, 0.1)


def test_trials_come_back_as_they_were(tmp_path):
    file = tmp_path / "t.json"
    first = Trials.open(file, {"graph": "1"})
    assert first.trial(TRIAL.candidate, lambda _: TRIAL) is TRIAL
    assert first.ranking("mse", lambda _: RANKING) is RANKING
    again = Trials.open(file, {"graph": "1"})
    assert again.trials == [TRIAL]
    assert again.rankings == {"mse": RANKING}
    assert again.notes == ["t.json: 1 trials of an earlier run were taken up"]
    assert again.trial(TRIAL.candidate, lambda _: None) == TRIAL
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize("change", [{}, {"passed": False}, {"metrics": ()}, {"problems": ("worse",)}])
def test_trials_that_would_end_otherwise_now_are_forgotten(change, tmp_path):
    file = tmp_path / "t.json"
    first = Trials.open(file, {"graph": "1"})
    first.ranking("mse", lambda _: RANKING)
    missed = dataclasses.replace(TRIAL, candidate=Candidate("mse", ()), passed=False)
    for trial in (TRIAL, missed):
        first.trial(trial.candidate, lambda _, t=trial: t)
    again, now, asked = Trials.open(file, {"graph": "1"}), dataclasses.replace(TRIAL, **change), []
    again.require_repeats(lambda candidate: asked.append(candidate) or now)
    assert asked == [TRIAL.candidate]
    said = "were judged otherwise than now; started afresh" if change else "of an earlier run were taken up"
    assert again.notes == [f"t.json: 2 trials {said}"]
    assert again.trials == ([now] if change else [TRIAL, missed])
    kept = Trials.open(file, {"graph": "1"})
    assert (kept.trials, kept.rankings) == (again.trials, {"mse": RANKING})
    Trials(tmp_path / "none", {}).require_repeats(lambda _: pytest.fail("there is nothing to repeat"))


def test_a_metric_that_reads_a_file_takes_up_no_trial_of_another_one(tmp_path, capsys):
    """The digests of trials know of its source alone."""
    (tmp_path / "net_of_costs.py").write_text(
        "import pathlib\n\nimport numpy\nimport torch\n\nCOSTS = pathlib.Path(__file__).with_name('costs.npy')\n\n\n"
        "def net():\n    torch.manual_seed(0)\n    return torch.nn.Linear(8, 3)\n\n\n"
        "def cost(outputs, labels, ids):\n    return numpy.load(COSTS)[outputs['y'].argmax(1)]\n"
    )
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((16, 8), np.float32))
    (tmp_path / "job.yaml").write_text(
        "name: costs\nmodel: {factory: 'net_of_costs:net'}\n"
        "inputs: {x: {shape: [N, 8], N: {min: 1, opt: 4, max: 4}}}\noutputs: {y: {}}\n"
        "precision: {int8_mode: true}\n"
        "calibration: {arrays: x.npy, batch_size: 4, corrections: false}\nbuild: {target: onnxruntime}\n"
        "check:\n  arrays: x.npy\n  metrics: {cost: 'net_of_costs:cost'}\n"
        "  limits: {sqnr_db_min: 10, metrics: {cost: {min: 0.9}}}\n"
    )
    codes, notes = [], []
    for costs in ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.5, 0.5, 0.5]):
        np.save(tmp_path / "costs.npy", np.array(costs))
        codes.append(main(["tune", str(tmp_path / "job.yaml"), "-o", str(tmp_path / "out")]))
        notes.append(capsys.readouterr().err)
    assert codes == [0, 0, 1], notes
    assert ["taken up" in note for note in notes] == [False, True, False], notes
    assert ["judged otherwise than now" in note for note in notes] == [False, False, True], notes


def test_trials_of_another_graph_are_not_taken(tmp_path):
    file = tmp_path / "t.json"
    Trials.open(file, {"graph": "1", "limits": "x"}).trial(TRIAL.candidate, lambda _: TRIAL)
    other = Trials.open(file, {"graph": "2", "limits": "x"})
    assert other.trials == []
    assert other.notes == ["t.json: its trials were made before a change of graph; started afresh"]


@pytest.mark.parametrize("text", ["", "{}", '{"format": "trtpipe-trials", "version": 2}', "[1"])
def test_a_damaged_file_of_trials_is_refused(tmp_path, text):
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"t\.json: must be a file of trials \(got .*\)\. Remove it to start afresh\."):
        Trials.open(file, {"graph": "1"})


def test_an_interrupted_search_has_kept_what_it_found(tmp_path):
    file = tmp_path / "t.json"
    first = Trials.open(file, {"graph": "1"})
    first.trial(TRIAL.candidate, lambda _: TRIAL)

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.trial(Candidate("minmax"), interrupted)
    assert Trials.open(file, {"graph": "1"}).trials == [TRIAL]
    assert np.isinf(Trials.open(file, {"graph": "1"}).trials[0].metrics[0].value)
