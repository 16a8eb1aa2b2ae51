import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.errors import InputError
from trtpipe.job import yamlfile
from trtpipe.job.load import JobErrors, read_job, read_jobs
from trtpipe.job.matrix import expand
from trtpipe.pipeline.validate import validate

BODY = """
model: {factory: "torch.nn:Identity"}
inputs: {x: {dtype: float32, shape: [N, 4], N: {min: 1, opt: 2, max: 4}}}
outputs: {y: {dtype: float32}}
calibration: {arrays: data.npz}
check: {arrays: data.npz}
"""


def write(folder, head, body=BODY):
    np.savez(folder / "data.npz", x=np.zeros((1, 4), np.float32))
    path = folder / "jobs.yaml"
    path.write_text(head + body)
    return path


def problems(folder, head, body=BODY):
    with pytest.raises(JobErrors) as caught:
        read_jobs(write(folder, head, body))
    return [str(p).replace(str(folder) + "/", "") for p in caught.value.problems]


def test_each_combination_is_a_job_with_a_name_of_its_own(tmp_path):
    head = "name: a\nmatrix:\n  precision: [fp16, int8_fp16]\n  target: [tensorrt_rtx, onnxruntime]\n"
    jobs = read_jobs(write(tmp_path, head))
    assert [j.name for j in jobs] == [
        "a-fp16-tensorrt_rtx", "a-fp16-onnxruntime", "a-int8_fp16-tensorrt_rtx", "a-int8_fp16-onnxruntime",
    ]  # fmt: skip
    assert [(j.precision.fp16_mode, j.precision.int8_mode, j.build.target) for j in jobs] == [
        (True, False, "tensorrt_rtx"),
        (True, False, "onnxruntime"),
        (True, True, "tensorrt_rtx"),
        (True, True, "onnxruntime"),
    ]
    assert jobs[2].text.endswith("# matrix precision=int8_fp16, target=tensorrt_rtx\n")


@pytest.mark.parametrize("label", ["fp32", "fp16", "int8", "int8_fp16", "fp8_fp16"])
@pytest.mark.parametrize("own", ["nvfp4_mode: true", "weights: int4", "int8_mode: true", "fp8_mode: true"])
def test_a_word_of_the_axis_precision_turns_every_other_format_off(tmp_path, label, own):
    """A cell named fp32 kept the job's NVFP4, or its weights in INT4."""
    head = f"name: a\nprecision: {{fp16_mode: true, {own}}}\nmatrix:\n  precision: [{label}]\n"
    (job,) = read_jobs(write(tmp_path, head))
    assert job.precision.on == tuple(m for m in ("int8_mode", "fp8_mode") if m.partition("_")[0] in label.split("_"))
    assert job.precision.half == ("fp16" if "fp16" in label else None)


def test_the_name_says_where_labels_go_and_the_others_are_appended(tmp_path):
    head = "name: '{target}.a'\nmatrix:\n  target: [onnxruntime]\n  calibration.batch_size: [8]\n"
    assert [j.name for j in read_jobs(write(tmp_path, head))] == ["onnxruntime.a-8"]


def test_a_mapping_is_laid_over_and_anything_else_replaces(tmp_path):
    head = "name: a\nmatrix:\n  calibration: {few: {samples: 4}, other: {samples: 8, algorithm: minmax}}\n"
    few, other = read_jobs(write(tmp_path, head))
    assert (few.calibration.samples, few.calibration.algorithm) == (4, "auto")
    assert (other.calibration.samples, other.calibration.algorithm) == (8, "minmax")
    assert few.calibration.arrays == other.calibration.arrays == str(tmp_path / "data.npz")


def test_paths_in_a_list_are_labelled_by_their_stem_and_resolved(tmp_path):
    for name in ("small", "large"):
        (tmp_path / f"{name}.safetensors").touch()
    head = "name: '{weights}'\nmatrix:\n  weights: [./small.safetensors, ./large.safetensors]\n"
    jobs = read_jobs(write(tmp_path, head))
    assert [(j.name, j.model.weights) for j in jobs] == [
        (n, str(tmp_path / f"{n}.safetensors")) for n in ("small", "large")
    ]


def test_versions_in_a_list_are_taken_as_written(tmp_path):
    head = "name: a\nmatrix:\n  build.compute_capability: {orin: [8.6, 12.10]}\n"
    assert problems(tmp_path, head) == [
        "jobs.yaml:3: build.compute_capability[1]: must be a compute capability like 8.6 (got '12.10')."
    ]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("name: a\nmatrix: 3\n",
         ["jobs.yaml:2: matrix: must be a mapping of axes to values (got 3). Like {target: [tensorrt_rtx]}."]),
        ("name: a\nmatrix:\n  targte: [onnxruntime]\n",
         ["jobs.yaml:3: matrix.targte: must be the path of a key, like build.target, or one of target, route, "
          "algorithm, weights (got targte). Did you mean target?"]),
        ("name: a\nmatrix:\n  target: onnxruntime\n",
         ["jobs.yaml:3: matrix.target: must be a list of values, or a mapping of labels to values "
          "(got 'onnxruntime')."]),
        ("name: a\nmatrix:\n  precision: [fp17]\n",
         ["jobs.yaml:3: matrix.precision[0]: must be one of fp32, fp16, bf16, int8, int8_fp16, int8_bf16, "
          "fp8, fp8_fp16, fp8_bf16, or a mapping "
          "(got 'fp17'). Did you mean fp16?"]),
        ("name: a\nmatrix:\n  model: [{factory: x}]\n",
         ["jobs.yaml:3: matrix.model[0]: must have a label when it is not plain text or a number "
          "(got a mapping of factory). Write model as a mapping: {label: value}."]),
        ("name: a\nmatrix:\n  target: {a b: onnxruntime}\n",
         ["jobs.yaml:3: matrix.target.a b: must be labelled with letters, digits, '.', '_' and '-' (got 'a b')."]),
        ("name: a\nmatrix:\n  target: [onnxruntime, onnxruntime]\n",
         ["jobs.yaml:3: matrix.target[1]: must have a label of its own (got 'onnxruntime' again)."]),
        ("name: '{traget}'\nmatrix:\n  target: [onnxruntime]\n",
         ["jobs.yaml:1: name: must hold placeholders of axes alone: target (got {traget}). Did you mean target?"]),
        ("name: '{target}'\nmatrix:\n  target: {a: onnxruntime, a-b: onnxruntime}\n  route: {b-c: onnx, c: onnx}\n",
         ["jobs.yaml:1: name: must give each job a name of its own (got 'a-b-c' for target=a, route=b-c and for "
          "target=a-b, route=c). Name every axis in it."]),
        ("name: a\nmatrix:\n  calibration.seed: [" + ", ".join(map(str, range(101))) + "]\n  check.seed: ["
         + ", ".join(map(str, range(100))) + "]\n",
         ["jobs.yaml:2: matrix: must make at most 10000 jobs (got 10100). Split the file."]),
        ("name: a\nmatrix:\n  algorithm: [auto, mse]\n  calibration.algorithm: [minmax]\n",
         ["jobs.yaml:4: matrix.calibration.algorithm: must set other keys than matrix.algorithm (got "
          "calibration.algorithm). Take one of the two axes out."]),
        ("name: a\nmatrix:\n  precision.int8_mode: [true, false]\n  precision: [fp16]\n",
         ["jobs.yaml:4: matrix.precision: must set other keys than matrix.precision.int8_mode (got "
          "precision.int8_mode). Take one of the two axes out."]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_matrix_is_said_at_its_line(tmp_path, head, expected):
    assert problems(tmp_path, head) == expected


AXES = {
    "target": ("onnxruntime",),
    "build.target": ("onnxruntime",),
    "build": ("{l: {target: onnxruntime}}", "{l: {route: onnx}}", "{l: {}}", "{l: null}"),
    "route": ("onnx",),
    "precision": ("fp16", "int8", "{l: {int8_mode: true}}"),
    "precision.int8_mode": ("false",),
    "calibration": ("{l: {seed: 3}, m: {algorithm: minmax}}",),
    "calibration.seed": ("7",),
    "algorithm": ("mse",),
}  # fmt: skip


@given(st.lists(st.sampled_from(list(AXES)), min_size=2, max_size=4, unique=True), st.data())
def test_what_the_labels_of_a_job_say_is_in_it_or_the_matrix_is_refused(axes, data):
    """No axis hides another: the same jobs come of the axes in any order."""
    written = {axis: data.draw(st.sampled_from(AXES[axis])) for axis in axes}
    lines = {axis: value if value[0] == "{" else f"[{value}]" for axis, value in written.items()}

    def jobs(order):
        text = "name: a\nprecision: {bf16_mode: true}\ncalibration: {}\nbuild: {opset: 17}\nmatrix:\n"
        cells, wrong = expand(yamlfile.parse(text + "".join(f"  {axis}: {lines[axis]}\n" for axis in order)))
        made = {frozenset(c.labels.items()): {**c.document.data, "name": ""} for c in cells}
        return made, bool(wrong)

    assert jobs(axes) == jobs(axes[::-1])


def test_a_wrong_value_is_said_where_it_stands_in_the_matrix_and_once(tmp_path):
    head = "name: a\nmatrix:\n  precision: [fp32, fp16]\n  target: [onnxruntime, tensorrt-rtx]\n"
    assert problems(tmp_path, head) == [
        "jobs.yaml:4: build.target: must be tensorrt, tensorrt_rtx or onnxruntime (got 'tensorrt-rtx'). "
        "Did you mean tensorrt_rtx?"
    ]


def test_what_a_word_of_the_axis_precision_sets_is_said_at_its_line(tmp_path):
    head = "name: a\nbuild: {target: onnxruntime}\nmatrix:\n  precision: [fp16, fp8]\n"
    assert problems(tmp_path, head) == [
        "jobs.yaml:4: precision.fp8_mode: must be false for target onnxruntime (got true). ONNX Runtime optimizes FP8 "
        "graphs wrongly on a CPU and has no FP4: use int8_mode."
    ]


def test_a_value_that_is_wrong_for_some_combinations_alone_names_them(tmp_path):
    head = "name: a\nprecision: {fp16_mode: true, placement: all}\nmatrix:\n  precision: "
    labels = "{int8: {int8_mode: true}, w4: {weights: int4}, half: {}}\n"
    assert [p for p in problems(tmp_path, head + labels) if "placement" in p] == [
        "jobs.yaml:2: precision.placement: must be auto unless one of int8_mode and fp8_mode and one of fp16_mode and "
        "bf16_mode are true (got all). It is about which operations take INT8 or FP8 rather than FP16 or BF16. "
        "In the matrix: precision=w4; precision=half."
    ]


def test_a_wrong_key_outside_the_matrix_is_said_once(tmp_path):
    head = "name: a\nmatrix:\n  precision: [fp32, fp16]\nchek: 1\n"
    assert len(problems(tmp_path, head)) == 1
    assert len(validate(tmp_path / "jobs.yaml", here=False)) == 1


def test_set_is_laid_over_every_job(tmp_path):
    path = write(tmp_path, "name: a\nmatrix:\n  precision: [fp32, fp16]\n")
    assert [j.check.seed for j in read_jobs(path, ["check.seed=5"])] == [5, 5]


@pytest.mark.parametrize(
    ("override", "axis"),
    [("build.target=onnxruntime", "target"), ("build={target: onnxruntime}", "target"),
     ("precision.int8_mode=false", "precision"), ("precision={fp16_mode: true}", "precision")],
)  # fmt: skip
def test_what_an_axis_sets_is_not_overridden(tmp_path, override, axis):
    """The jobs' names would say what they are not: `a-int8` in FP32."""
    path = write(tmp_path, "name: a-{precision}\nmatrix:\n  precision: [fp32, fp16]\n  target: [onnxruntime]\n")
    if "int8" in override:
        path = write(tmp_path, "name: a-{precision}\nmatrix:\n  precision: [fp16, int8]\n  target: [onnxruntime]\n")
    with pytest.raises(JobErrors) as caught:
        read_jobs(path, [override])
    key = override.partition("=")[0]
    assert str(caught.value).startswith(
        f"--set: {key}: must be left to the matrix, whose axis {axis} sets it (got '{override}'). The names of its "
        f"jobs say {{{axis}}}: edit the file."
    )
    assert len(read_jobs(path, ["check.seed=5"])) == 2


def test_a_matrix_is_not_one_job(tmp_path):
    path = write(tmp_path, "name: a\nmatrix:\n  precision: [fp32, fp16]\n")
    with pytest.raises(JobErrors) as caught:
        read_job(path)
    assert str(caught.value).endswith(
        "matrix: must not be in the file of one job (got several jobs). "
        "Give it to `trtpipe build`, `validate` or `nightly`."
    )


def test_python_takes_one_job(tmp_path):
    from trtpipe import api

    path = write(tmp_path, "name: a\nmatrix:\n  precision: [fp32, fp16]\nbuild: {target: onnxruntime}\n")
    with pytest.raises(InputError, match=r"jobs.yaml: must be one job \(got a matrix of 2\)\. Give the file to"):
        api.load_job(path)


def test_the_file_itself_is_not_changed_by_its_expansion():
    document = yamlfile.parse("name: a\nmatrix: {calibration.seed: [1, 2]}\ncalibration: {samples: 3}\n")
    cells, _ = expand(document)
    assert [c.document.data["calibration"] for c in cells] == [{"samples": 3, "seed": 1}, {"samples": 3, "seed": 2}]
    assert document.data["calibration"] == {"samples": 3}
