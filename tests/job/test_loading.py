import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from jobs import GOOD, INPUT, write
from pydantic import BaseModel

from calib.frozen import ReadOnly
from trtpipe.bundle.signing import load_public_keys
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.job.job import Job
from trtpipe.job.load import JobErrors, JobFile, read_job, read_jobs
from trtpipe.job.sections import Build


def test_every_problem_at_once(folder):
    path = write(folder, ("factory:", "factroy:"), ("entropy_2", "entropy3"), ("images: val", "images: vla"),
                 ("  fp16_mode: true", "  fp16_mode: true\n  bf16_mode: true"))  # fmt: skip
    with pytest.raises(JobErrors) as raised:
        read_job(path)
    assert [p.path for p in raised.value.problems] == [
        "model.factroy",
        "precision.bf16_mode",
        "calibration.algorithm",
        "check.images",
    ]


@pytest.mark.parametrize("text", ["check.limits.cosine_min=", "check.limits.cosine_min= "])
def test_a_limit_is_not_taken_away_by_an_empty_variable_of_the_shell(folder, text):
    with pytest.raises(JobErrors) as raised:
        read_job(write(folder), [text])
    assert str(raised.value) == (
        "--set: check.limits.cosine_min: must have a value (got nothing). Write null where it may be left out."
    )
    limits = read_job(write(folder), ["check.limits={cosine_min: 0.5, sqnr_db_min: 1}", "check.limits.cosine_min=null"])
    assert limits.check.limits.given == {"sqnr_db_min": 1}


@pytest.mark.parametrize(
    ("first", "then"),
    [("check.limits.cosine_min=0.5", "check.limits={sqnr_db_min: 1}"), ("check.batch_size=2", "check.batch_size=4"),
     ("build.route=onnx", "build={target: tensorrt}")],
)  # fmt: skip
def test_no_override_takes_away_another(folder, first, then):
    """A limit of one was not in force, without a word; the other way round the second changes the first."""
    with pytest.raises(JobErrors) as raised:
        read_job(write(folder), [first, then])
    key, replaced = then.partition("=")[0], first.partition("=")[0]
    assert str(raised.value) == (
        f"--set: {key}: must not replace what another --set gives (got '{then}' after {replaced}). Give one."
    )


def test_a_file_that_is_no_job_is_not_shown(folder):
    (folder / "key").write_text("-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA==\n-----END PRIVATE KEY-----\n")
    with pytest.raises(JobErrors) as raised:
        read_job(folder / "key")
    assert str(raised.value).startswith(f"{folder}/key:1: must be a mapping (got text). Its keys are name, ")


def test_one_override_may_stand_alone(folder):
    assert read_job(write(folder), "name=other").name == "other"


def test_a_link_to_nothing_is_called_one(folder):
    (folder / "gone.yaml").symlink_to(folder / "nowhere.yaml")
    with pytest.raises(JobErrors) as raised:
        read_job(folder / "gone.yaml")
    assert str(raised.value) == f"{folder}/gone.yaml: must be a job file (got a link to nothing)."


def test_build_prints_the_same_problems_and_builds_nothing(folder, capsys):
    path = write(folder, ("entropy_2", "entropy3"))
    assert main(["build", str(path), "-o", str(folder / "out")]) == 2
    assert f"{path}:16: calibration.algorithm: must be" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_paths_are_from_the_folder_of_the_job_file(folder, monkeypatch):
    path = write(folder)
    monkeypatch.chdir(folder.parent)
    job = read_job(f"{folder.name}/{path.name}")
    assert job.model.weights == str(folder / "w.safetensors")
    assert job.calibration is not None
    assert job.calibration.images == str(folder / "calib")
    assert job.check.images == str(folder / "val")
    assert job.folder == folder


def test_the_folder_is_no_part_of_the_job(folder):
    job = read_job(write(folder))
    assert not {"folder", "_folder"} & set(job.model_dump(mode="json"))
    again = Job.model_validate(job.model_dump())
    assert again.folder is None
    assert (again.text, job.text) == ("", GOOD)
    assert read_job(folder / "job.yaml", ["check.seed=1"]).text == GOOD + "# --set check.seed=1\n"
    assert again.model_dump() == job.model_dump()
    assert Job.model_validate_json(job.model_dump_json()).model_dump() == job.model_dump()


def test_compute_capabilities_are_taken_as_written(folder, capsys):
    job = read_job(write(folder, ("[8.6, 12.0]", "[8.6, 12.0, '7.5']")))
    assert job.build.compute_capability == ("8.6", "12.0", "7.5")
    path = write(folder, ("[8.6, 12.0]", "[12.10]"))
    with pytest.raises(JobErrors, match=r"must be a compute capability like 8\.6 \(got '12\.10'\)"):
        read_job(path)


def test_capabilities_of_set_are_taken_as_written_too(folder):
    path = write(folder)
    with pytest.raises(JobErrors, match=r"must be a compute capability like 8\.6 \(got '12\.10'\)"):
        read_job(path, ["build.compute_capability=[12.10]"])
    job = read_job(path, ["build={compute_capability: [12.10]}", "build.compute_capability=[8.6, 12.0]"])
    assert job.build.compute_capability == ("8.6", "12.0")


def test_builder_options_are_read_as_strictly_as_the_rest(folder):
    lines = "build:\n  profiles: [{N: {min: 1, opt: 2, max: 32}}]\n  tensor_formats: {image: [linear]}\n"
    job = read_job(write(folder, ("build:\n", lines)))
    assert job.build.profiles[0]["N"].opt == 2
    assert job.build.tensor_formats == {"image": ("linear",)}
    with pytest.raises(
        JobErrors, match=r"build\.tf32: must be true or false \(got 'yes'\)\. Write true, without quotes"
    ):
        read_job(write(folder, ("build:\n", "build:\n  tf32: yes\n")))
    with pytest.raises(JobErrors, match=r"profiles\[0\]\.N: must have min <= opt <= max \(got 3, 2, 4\)"):
        read_job(write(folder, ("build:\n", "build:\n  profiles: [{N: {min: 3, opt: 2, max: 4}}]\n")))
    with pytest.raises(
        JobErrors, match=r"profiles\[0\]\.N: must be {min, opt, max}, whole numbers \(got a mapping of min"
    ):
        read_job(write(folder, ("build:\n", "build:\n  profiles: [{N: {min: 3}}]\n")))


def test_a_dimension_may_be_called_no(folder):
    job = read_job(write(folder, (INPUT, "{shape: [no, 1, 32, 32], no: {min: 1, opt: 2, max: 4}}")))
    (spec,) = job.input_specs()
    assert spec.shape == ("no", 1, 32, 32)
    assert (spec.at("min")[0], spec.at("opt")[0], spec.at("max")[0]) == (1, 2, 4)


def test_a_dimension_of_one_size_is_a_number(folder):
    job = read_job(
        write(folder, (INPUT, "{shape: [N, 1, H, 32], N: {min: 2, opt: 2, max: 2}, H: {min: 8, opt: 8, max: 32}}"))
    )
    (spec,) = job.input_specs()
    assert spec.shape == (2, 1, "H", 32)
    assert list(spec.dims) == ["H"]
    assert job.batch_size(job.check) == 2


def test_batch_size_stays_within_the_batch_dimension(folder):
    job = read_job(write(folder))
    assert job.batch_size(job.check) == 32
    assert job.batch_size(job.check.model_copy(update={"batch_size": 100})) == 32
    static = read_job(write(folder, (INPUT, "{shape: [4, 1, 32, 32]}")))
    assert static.batch_size(static.check) == 4


def test_the_check_uses_calibrations_transform(folder):
    job = read_job(write(folder))
    assert job.check.transform is None
    assert job.calibration is not None
    assert job.check_transform() == job.calibration.transform


def test_set_overrides_the_file(folder):
    path = write(folder)
    job = read_job(path, ("build.target=tensorrt", "precision.keep.fp32=[head.*]", "check.samples=3",
                          "build.compute_capability=[8.9]", "model.args.depth=2"))  # fmt: skip
    assert job.build.target == "tensorrt"
    assert job.precision.keep.fp32 == ("head.*",)
    assert job.check.samples == 3
    assert job.build.compute_capability == ("8.9",)
    assert job.model.args == {"depth": 2}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("build.target=tensort",
         "--set: build.target: must be tensorrt, tensorrt_rtx or onnxruntime (got 'tensort'). Did you mean tensorrt?"),
        ("build.tarket=tensorrt",
         f"--set: build.tarket: must be one of the {len(Build.model_fields)} keys that `trtpipe schema` lists here "
         "(got tarket). Did you mean target?"),
        ("nowhere.x=1",
         "--set: nowhere: must be one of the keys name, model, inputs, outputs, precision, calibration, build, check "
         "or worker (got nowhere)."),
        ("name.x=1", "--set: name: must be a mapping (got 'digits')."),
        ("check.images=nowhere",
         "--set: check.images: must be a folder that exists (got 'nowhere': nothing there). "
         "It is {dir}/nowhere, from the folder of the job file."),
        ("precision.bf16_mode=true",
         "--set: precision.bf16_mode: must not be set with fp16_mode (got both true). Choose one."),
        ("nonsense", "--set: must be SECTION.KEY=VALUE (got 'nonsense')."),
        ("a..b=1", "--set: must be SECTION.KEY=VALUE (got 'a..b=1')."),
        ("matrix.precision=[fp16]",
         "--set: matrix.precision: must be left to the file, which makes its jobs of it (got "
         "'matrix.precision=[fp16]'). Edit the file."),
        ("matrix={}", "--set: matrix: must be left to the file, which makes its jobs of it (got 'matrix={}'). Edit the "
         "file."),
        ("check.samples=*a", "--set: check.samples: must not be an alias (got *a). Write the value out."),
    ],
)  # fmt: skip
def test_a_bad_override_is_reported_as_set(override, expected, folder, capsys):
    assert main(["validate", str(write(folder)), "--set", override]) == 2
    assert capsys.readouterr().err.splitlines() == [expected.replace("{dir}", str(folder))]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("jop.yaml", None, "jop.yaml: must be a job file (got no such file). Did you mean job.yaml?"),
        ("bytes.yaml", b"name: \xff\n", "bytes.yaml: must be UTF-8 text (got byte 0xff at 6)."),
    ],
)
def test_files_that_cannot_be_read(name, content, expected, folder, capsys, monkeypatch):
    write(folder)
    if content is not None:
        (folder / name).write_bytes(content)
    monkeypatch.chdir(folder)
    assert main(["validate", name]) == 2
    assert capsys.readouterr().err.splitlines() == [expected]


def test_a_job_made_in_python_keeps_the_same_rules(folder):
    good = read_job(write(folder)).model_dump()
    with pytest.raises(ValueError, match=r"precision\.bf16_mode: must not be set with fp16_mode"):
        Job.model_validate(good | {"precision": {"fp16_mode": True, "bf16_mode": True}})


def test_job_only_ignores_what_this_machine_lacks(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(GOOD.replace("torch.nn:Identity", "no_such_package:build"))
    assert main(["validate", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4
    assert main(["validate", "--job-only", str(path)]) == 0
    job = JobFile(path, paths_exist=False).read()
    assert job is not None


def test_a_file_without_an_end_is_not_read_to_it(capsys):
    for path in ("/dev/zero", "/dev/urandom"):
        assert main(["validate", path]) == 2
        assert capsys.readouterr().err.startswith(f"{path}: must be a file or a folder (got a pipe or a device). ")
        with pytest.raises(JobErrors, match=rf"^{path}: must be readable \(got no regular file\)\.$"):
            read_job(path)


def test_nor_is_a_long_one(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_bytes(bytes((1 << 20) + 1))
    assert main(["validate", str(path)]) == 2
    assert f"{path}: must be a job file of at most 1048576 bytes (got more than 1048576 bytes)." in (
        capsys.readouterr().err
    )


def test_nor_is_a_key(tmp_path):
    with pytest.raises(InputError, match=r"^/dev/zero: must be a readable key file \(got: no regular file\)\."):
        load_public_keys(Path("/dev/zero"))
    (tmp_path / "key").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(InputError, match=r"key: must be a readable key file \(got: more than 1048576 bytes\)\."):
        load_public_keys(tmp_path / "key")


def test_paths_in_lists_are_those_of_the_jobs_folder(folder):
    (folder / "libtwice.so").write_bytes(b"")
    job = read_job(write(folder, ("compute_capability: [8.6, 12.0]", "target: tensorrt\n  plugins: [./libtwice.so]")))
    assert job.build.plugins == (str(folder / "libtwice.so"),)


@pytest.mark.parametrize("value", ["[bias, bia]", "yes", "3", "{a: 1}", "[[bias]]"])
def test_corrections_are_refused_in_the_words_of_the_file(folder, value):
    with pytest.raises(JobErrors) as raised:
        read_job(write(folder), [f"calibration.corrections={value}"])
    (problem,) = raised.value.problems
    assert problem.path == "calibration.corrections"
    assert problem.text.startswith(
        "must be true, false or a list of equalization, smoothing, thresholds, rounding or bias (got "
    )


def leaves(model, path=()):
    """The path of every key of a job file that holds no section."""
    for name, field in model.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if isinstance(a, type)]
        sections = [a for a in inner if issubclass(a, BaseModel)]
        if sections and get_origin(field.annotation) is not dict:
            yield from leaves(sections[0], (*path, name))
        elif name not in ("inputs", "outputs", "name"):
            yield ".".join((*path, name))


@pytest.mark.parametrize("value", ["[[]]", "{a: {b: 1}}", "[{a: 1}]", "-0.5", "'?'"])
def test_no_problem_names_a_type_of_the_code_as_a_key(folder, value):
    """Of a key that takes several types pydantic tells each, under a name of its own: `corrections.bool`."""
    path, known = write(folder), set(leaves(Job))
    assert len(known) > 60
    for key in sorted(known):
        try:
            read_jobs(path, [f"{key}={value}"], paths_exist=False)
        except JobErrors as error:
            for problem in error.problems:
                rest = problem.path.removeprefix(key)
                assert not re.search(r"\.(bool|int|str|float|(tuple|list|dict)\b|function-)(\W|$)", rest), problem
        except InputError:
            pass


def test_a_path_from_home_is_not_called_one_of_the_jobs_folder(folder):
    with pytest.raises(JobErrors) as raised:
        read_job(write(folder), ["check.images=~/nowhere-at-all"])
    (problem,) = raised.value.problems
    assert problem.text == (
        "must be a folder that exists (got '~/nowhere-at-all': nothing there). "
        f"It is {Path('~').expanduser()}/nowhere-at-all."
    )


def mappings(value: object, path: str = "job") -> Iterator[tuple[str, dict[str, object]]]:
    """Every dict in a model, with where it is."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from mappings(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        yield path, value
        for key, inner in value.items() if not path.endswith(".args") else ():  # what the user's code is given
            yield from mappings(inner, f"{path}.{key}")
    elif isinstance(value, tuple):
        for inner in value:
            yield from mappings(inner, path)


def test_no_mapping_of_a_job_can_be_changed() -> None:
    profile = {"N": {"min": 1, "opt": 8, "max": 32}}
    raw = {
        "name": "tiny",
        "model": {"factory": "net:make", "args": {"widths": {"a": 1}, "deep": [{"b": 2}]}},
        "inputs": {"image": {"shape": ["N", 3, 16, 16], **profile}},
        "outputs": {"logits": {}},
        "build": {"route": "onnx", "target": "tensorrt", "profiles": [profile]},
        "check": {"arrays": "/nowhere/check.npy"},
    }
    job = Job.model_validate(raw)
    found = dict(mappings(job))
    known = {"inputs", "build.profiles", "build.memory_pools", "check.metrics", "model.args"}
    assert {f"job.{path}" for path in known} <= set(found)
    for path, mapping in found.items():
        with pytest.raises(TypeError, match="a mapping of a frozen value is read-only"):
            mapping["x"] = 7
        for change in (mapping.clear, mapping.popitem, lambda m=mapping: m.update(x=7), lambda m=mapping: m.pop("x")):
            with pytest.raises(TypeError, match="read-only"):
                change()
        assert mapping == found[path]
    for other in (pickle.loads(pickle.dumps(job)), copy.deepcopy(job)):
        assert other == job
        assert {type(m) for m in dict(mappings(other)).values()} == {ReadOnly}
    dumped = job.model_dump(mode="json")
    assert type(dumped["inputs"]) is type(dumped["build"]["profiles"][0]) is dict
    assert Job.model_validate(dumped) == job
