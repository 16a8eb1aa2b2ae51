import dataclasses
import json
import shutil
import subprocess
import sys
from typing import get_args

import nights
import pytest

from trtpipe.job.load import read_job
from trtpipe.job.sections import Build, Correction, OwnMetric
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import Machine, source_fingerprint
from trtpipe.pipeline.cache.keys import Ingredients, Survey, stage_keys
from trtpipe.pipeline.cache.sources import environment_variables
from trtpipe.pipeline.prepared import Stages
from trtpipe.pipeline.stages import calibrate, lower, prepare
from trtpipe.progress import Silent

MACHINE = Machine(
    versions={"trtpipe": "1", "torch": "2.14.1", "tensorrt-rtx": "1.6", "onnx": "1.2",
              "onnxruntime": "1.31", "numpy": "2.0", "pillow": "12"},
    python="3.11.7", system="Linux x86_64", source="s", cuda="12.6", gpu="RTX 4090 8.9",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return nights.make_world(tmp_path / "jobs", 2)


def look(folder, extra="precision: {int8_mode: true}\n", machine=MACHINE, weight="w0.safetensors", name="a"):
    job = read_job(nights.write_job(folder, name, extra, weight))
    found = Survey(Digests(), machine).ingredients(job)
    return found, stage_keys(job, found)


def changed(before, after):
    """Names of the stages whose key differs."""
    pairs = dataclasses.asdict(before), dataclasses.asdict(after)
    return {name for name in pairs[0] if pairs[0][name] != pairs[1][name]}


def machine(**versions):
    return dataclasses.replace(MACHINE, versions={**MACHINE.versions, **versions})


def test_nothing_changed_nothing_changes(folder):
    (first, keys), (again, same) = look(folder), look(folder)
    assert first.key == again.key
    assert changed(keys, same) == set()
    assert again.changes(first.parts) == ()


ALL = {"model", "baseline", "calibration", "graph", "engine"}


@pytest.mark.parametrize(
    ("extra", "on", "stages", "reason"),
    [
        ("precision: {int8_mode: true}\n", machine(**{"tensorrt-rtx": "1.7"}), {"engine"}, "tensorrt-rtx 1.6 -> 1.7"),
        ("precision: {int8_mode: true}\n", dataclasses.replace(MACHINE, gpu="RTX 5090 12.0"), ALL - {"model"},
         "gpu RTX 4090 8.9 -> RTX 5090 12.0"),
        ("precision: {int8_mode: true}\n", dataclasses.replace(MACHINE, cuda="13.0"), {"engine"},
         "cuda driver 12.6 -> 13.0"),
        ("precision: {int8_mode: true}\n", machine(onnx="1.3"), {"graph", "engine"}, "onnx 1.2 -> 1.3"),
        ("precision: {int8_mode: true}\n", machine(torch="2.15"), ALL, "torch 2.14.1 -> 2.15"),
        ("precision: {int8_mode: true}\n", machine(onnxruntime="1.32"), set(), "onnxruntime 1.31 -> 1.32"),
        ("precision: {int8_mode: true, keep: {fp32: ['6']}}\n", MACHINE, {"calibration", "graph", "engine"},
         'precision.keep.fp32 added, or no longer its default (["6"])'),
        ("precision: {}\n", MACHINE, {"calibration", "graph", "engine"},
         "precision.int8_mode removed, or set to its default (true)"),
        ("precision: {int8_mode: true}\nbuild: {optimization_level: 5}\n", MACHINE, {"engine"},
         "build.optimization_level added, or no longer its default (5)"),
        ("precision: {int8_mode: true}\nbuild: {log_level: info}\nworker: [orin]\n", MACHINE, set(), None),
    ],
)  # fmt: skip
def test_a_change_reaches_the_stages_that_depend_on_it_and_is_named(folder, extra, on, stages, reason):
    before, keys = look(folder)
    after, others = look(folder, extra, on)
    assert changed(keys, others) == stages
    assert reason is None or reason in after.changes(before.parts)
    assert (after.key == before.key) == (reason is None)


@pytest.mark.parametrize(
    ("change", "stages", "reason"),
    [
        (lambda f: nights.data(f / "val.npz", 9), {"baseline"}, "check data changed"),
        (lambda f: nights.data(f / "calib.npz", 9), {"calibration", "graph", "engine"}, "calibration data changed"),
        (lambda f: nights.write_weights(f / "w0.safetensors", scale=2), ALL, "weights changed"),
        (lambda f: (f / "net.py").write_text(nights.NET + "#"), ALL, "source of net changed"),
        (lambda f: (f / "w0.safetensors").touch(), set(), None),
    ],
)
def test_a_changed_file_reaches_the_stages_that_depend_on_it(folder, change, stages, reason):
    before, keys = look(folder)
    change(folder)
    after, others = look(folder)
    assert changed(keys, others) == stages
    assert after.changes(before.parts) == ((reason,) if reason else ())


@pytest.mark.parametrize(
    ("change", "stages", "reasons"),
    [
        (lambda f: (f / "cat" / "a.png").write_bytes(b"another"), {"calibration", "graph", "engine"},
         ("calibration data changed",)),
        (lambda f: (f / "cat").rename(f / "ape"), ALL - {"model"},
         ("calibration classes changed", "calibration data changed")),
    ],
)  # fmt: skip
def test_of_images_to_calibrate_with_the_baseline_takes_the_names_of_classes(folder, change, stages, reasons):
    """By them the check's class folders may be numbered; another photograph changes no baseline."""
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        (folder / "photos" / name / "a.png").write_bytes(b"one")

    def look_at():
        path = nights.write_job(folder, "a", "precision: {int8_mode: true}\n", "w0.safetensors")
        path.write_text(
            path.read_text().replace(
                "calibration: {arrays: calib.npz", "calibration: {images: photos, transform: {grayscale: true}"
            )
        )
        job = read_job(path)
        found = Survey(Digests(), MACHINE).ingredients(job)
        return found, stage_keys(job, found)

    before, keys = look_at()
    change(folder / "photos")
    after, others = look_at()
    assert changed(keys, others) == stages
    assert after.changes(before.parts) == reasons


@pytest.mark.parametrize(("name", "stages"), [("val", {"baseline"}), ("calib", {"calibration", "graph", "engine"})])
def test_arrays_of_another_name_hold_other_samples(folder, name, stages):
    """By its own name, which has the file's, each is drawn and has its place."""
    before, keys = look(folder)
    (folder / f"{name}.npz").rename(folder / "renamed.npz")
    path = nights.write_job(folder, "a", "precision: {int8_mode: true}\n", "w0.safetensors")
    path.write_text(path.read_text().replace(f"{name}.npz", "renamed.npz"))
    job = read_job(path)
    found = Survey(Digests(), MACHINE).ingredients(job)
    assert changed(keys, stage_keys(job, found)) == stages
    assert any(reason.endswith("data changed") for reason in found.changes(before.parts))


def test_the_packages_of_a_module_are_sources_too(folder):
    """They run before it; else its first build would have to show that they are read."""
    for path, text in (("own/__init__.py", ""), ("own/deep/__init__.py", "SLOPE = 1"), ("own/deep/act.py", "")):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    (folder / "net.py").write_text(nights.NET + "\nfrom own.deep.act import __name__ as name\n")
    before, _ = look(folder)
    assert {"source own", "source own.deep", "source own.deep.act"} <= set(before.parts)
    (folder / "own/__init__.py").write_text("#")
    after, _ = look(folder)
    assert after.changes(before.parts) == ("source of own changed",)


def installed(site, distribution, version, *modules):
    """What an installation leaves of modules with one line each, the same in every version."""
    for old in site.glob(f"{distribution.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    files = [f"{module}/__init__.py" for module in modules]
    for file in files:
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).write_text("act = None\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in (*files, f"{info.name}/METADATA")))


@pytest.mark.parametrize(
    ("distribution", "module"),
    [("seeing", "seeing"), ("seeing-python", "seeing"), ("Open_Seeing.Torch", "open_seeing")],
)
def test_another_version_of_a_package_that_the_code_imports_is_another_bundle(
    distribution, module, folder, tmp_path, monkeypatch
):
    """Whatever distribution brings it, as cv2 comes from opencv-python: its `__init__` may be the same in both."""
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    (folder / "net.py").write_text(nights.NET + f"\nfrom {module} import act\n")
    installed(site, distribution, "1.0", module, "another_of_it")
    before, keys = look(folder)
    again, _ = look(folder)
    assert again.key == before.key
    installed(site, distribution, "1.1", module, "another_of_it")
    after, others = look(folder)
    assert changed(keys, others) == ALL
    name = distribution.lower().replace("_", "-").replace(".", "-")
    assert after.changes(before.parts) == (f"{name} 1.0 -> 1.1",)


def test_what_counts_by_its_own_version_is_no_source(folder):
    (folder / "net.py").write_text(nights.NET + "\nimport PIL.Image, onnx_ir, torchvision, numpy, json, calib\n")
    assert {name for name in look(folder)[0].parts if name.startswith("source")} == {"source net"}


def test_which_outputs_are_of_boxes_counts_for_all_that_their_bindings_say(folder):
    """`classes` of a binding: what ranks none in one night would rank none in the next."""
    boxes = OwnMetric(function="coco_map", args={"classes": "y", "scores": "z"})
    job = read_job(nights.write_job(folder, "a", "precision: {int8_mode: true}\n", "w0.safetensors"))
    found = Survey(Digests(), MACHINE).ingredients(job)
    judged = job.model_copy(update={"check": job.check.model_copy(update={"metrics": {"map": boxes}})})
    assert judged.boxed == {"y", "z"}
    assert changed(stage_keys(job, found), stage_keys(judged, found)) == {
        "model", "baseline", "calibration", "graph", "engine",
    }  # fmt: skip


#: Options that a graph is made with and its key does not name, and why.
BY_OTHER_PARTS = {
    "plugins": "the libraries themselves are in it",
    "compute_capability": "of a graph that was kept, what they compile is asked again",
}


@pytest.mark.parametrize(
    "extra",
    [
        "precision: {int8_mode: true}\nbuild: {target: onnxruntime}\n",
        "precision: {int8_mode: true, fp16_mode: true}\nbuild: {target: tensorrt_rtx}\n",
        "precision: {int8_mode: true}\nbuild: {target: tensorrt, quantization: implicit}\n",
        "precision: {fp16_mode: true}\nbuild: {target: tensorrt_rtx}\n",
    ],
)
def test_a_graph_has_every_option_of_the_build_that_it_is_made_with_in_its_key(folder, extra, monkeypatch):
    job = read_job(nights.write_job(folder, "m", extra))
    stages = Stages(Silent())
    prepared = prepare(job, stages)
    table = calibrate(job, prepared, stages)
    read = set()

    def recorded(options, name):
        read.add(name)
        return object.__getattribute__(options, name)

    with monkeypatch.context() as patched:
        patched.setattr(Build, "__getattribute__", recorded, raising=False)
        lower(job, prepared, lambda: table, stages)
    parts = Survey(Digests(), MACHINE).ingredients(job).parts
    named = {name for name in Build.model_fields if name in read} - BY_OTHER_PARTS.keys()
    assert "target" in named
    for name in named:
        other = Ingredients({**parts, f"job build.{name}": "another"})
        assert "graph" in changed(stage_keys(job, Ingredients(parts)), stage_keys(job, other)), name


def test_what_an_earlier_night_kept_otherwise_is_said_all_the_same():
    """Settings that were no JSON, and a file that the code reads whose name ends like that of an order."""
    before = {"job model.factory": "net:net", "job precision.int8_mode": "true", "read my order": "0a", "name": "a"}
    now = Ingredients({"job model.factory": '"net:other"', "read my order": "0b", "name": "a"})
    assert now.changes(before) == (
        "my order, read by the job's code, changed",
        "model.factory net:net -> net:other",
        "precision.int8_mode removed, or set to its default (true)",
    )


def altered(job, section, **values):
    return job.model_copy(update={section: getattr(job, section).model_copy(update=values)})


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"a": "false"}, {"a": False}, 'model.args.a "false" -> false'),
        ({"a": "18"}, {"a": 18}, 'model.args.a "18" -> 18'),
        ({"a": "null"}, {"a": None}, 'model.args.a "null" -> null'),
        ({"a": "{}"}, {"a": {}}, 'model.args.a "{}" -> {}'),
        ({"a": '["b"]'}, {"a": ["b"]}, 'model.args.a "[\\"b\\"]" -> ["b"]'),
        ({"a": "one"}, {"a": "two"}, "model.args.a one -> two"),
        ({"a.b": 1}, {"a": {"b": 1}}, 'model.args."a.b" removed, or set to its default (1)'),
        ({"a": {"b.c": 1}}, {"a": {"b": {"c": 1}}}, 'model.args.a."b.c" removed, or set to its default (1)'),
        ({"a b": 1, "c": 2}, {"a b": 2, "c": 2}, 'model.args."a b" 1 -> 2'),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, 'model.args order ["a", "b"] -> ["b", "a"]'),
        ({"of": [{"a": 1, "b": 2}]}, {"of": [{"b": 2, "a": 1}]},
         'model.args.of [{"a": 1, "b": 2}] -> [{"b": 2, "a": 1}]'),
    ],
)  # fmt: skip
def test_arguments_that_differ_have_other_keys(folder, one, other, reason):
    job = read_job(nights.write_job(folder, "a", "precision: {int8_mode: true}\n", "w0.safetensors"))
    survey = Survey(Digests(), MACHINE)
    jobs = [altered(job, "model", args=args) for args in (one, other)]
    (before, now), keys = zip(*((found := survey.ingredients(j), stage_keys(j, found)) for j in jobs), strict=True)
    assert before.key != now.key
    assert changed(*keys) == ALL
    assert reason in now.changes(before.parts)
    assert not any(" order" in r for r in now.changes(before.parts)) or " order" in reason


@pytest.mark.parametrize(
    ("section", "value", "stages"),
    [
        ("inputs", None, ALL),
        ("outputs", None, ALL),
        ("formats", {"a*": "fp8", "*b": "int8"}, {"graph", "engine"}),
        ("device_types", {"a*": "dla", "*b": "gpu"}, {"engine"}),
    ],
)
def test_the_order_of_what_a_job_names_counts(folder, section, value, stages):
    """The first of two outputs is the network's first; of two globs that fit the last decides."""
    job = read_job(nights.write_job(folder, "a", "precision: {int8_mode: true}\n", "w0.safetensors"))
    names = {"formats": "precision", "device_types": "build"}
    of = value or {name: next(iter(getattr(job, section).values())) for name in ("a", "b")}
    turned = dict(reversed(of.items()))
    found = []
    for mapping in (of, turned):
        given = {section: mapping}
        made = altered(job, names[section], **given) if section in names else job.model_copy(update=given)
        parts = Survey(Digests(), MACHINE).ingredients(made)
        found.append((made, parts, stage_keys(made, parts), source_fingerprint(made, {})))
    (_, before, keys, source), (_, now, others, other_source) = found
    assert changed(keys, others) >= stages
    path = f"{names[section]}.{section}" if section in names else section
    assert now.changes(before.parts) == (f"{path} order {json.dumps(list(of))} -> {json.dumps(list(turned))}",)
    assert source != other_source


def test_fp16_without_calibration_takes_its_ranges_from_the_check_data(folder):
    job = folder / "a.yaml"

    def keys():
        nights.write_job(folder, "a", "precision: {fp16_mode: true}\n")
        lines = job.read_text().splitlines(keepends=True)
        job.write_text("".join(line for line in lines if not line.startswith("calibration")))
        read = read_job(job)
        return stage_keys(read, Survey(Digests(), MACHINE).ingredients(read))

    before = keys()
    nights.data(folder / "val.npz", 9)
    assert changed(before, keys()) == {"baseline", "graph", "engine"}


def test_a_job_elsewhere_is_the_same_job(folder, tmp_path):
    before, _ = look(folder)
    folder.rename(tmp_path / "elsewhere")
    assert look(tmp_path / "elsewhere")[0].key == before.key


def test_another_name_is_another_bundle_of_the_same_stages(folder):
    (first, keys), (second, others) = look(folder), look(folder, name="b")
    assert first.key != second.key
    assert changed(keys, others) == set()


def test_what_the_model_imports_of_the_users_own_is_watched(folder):
    (folder / "parts").mkdir()
    (folder / "parts/__init__.py").write_text("from .layers import block\n")
    (folder / "parts/layers.py").write_text("import os, torch\nfrom trtpipe import values\nblock = 1\n")
    (folder / "net.py").write_text("def net():\n    from parts import block\n" + nights.NET)
    found, _ = look(folder)
    assert {n for n in found.parts if n.startswith("source ")} == {"source net", "source parts", "source parts.layers"}
    (folder / "parts/layers.py").write_text("block = 2\n")
    assert look(folder)[0].changes(found.parts) == ("source of parts.layers changed",)


def test_what_nobody_sees_of_the_jobs_code_is_said(folder):
    (folder / "deep.py").write_text(
        "import os, mmap, torch, timm, onnxruntime\nHOME, KEY = os.environ['TT_HOME'], os.getenv('TT_KEY', '')\n"
    )
    (folder / "samples.py").write_text("import deep\ndef few():\n    return []\n")
    path = nights.write_job(folder, "a")
    path.write_text(path.read_text().replace("check: {arrays: val.npz", 'check: {factory: "samples:few"'))
    found = Survey(Digests(), MACHINE).ingredients(read_job(path))
    assert "check source samples" in found.parts
    variables = "the job's code reads environment variables (TT_HOME, TT_KEY); use --force when these change"
    unseen = (
        "the job's code imports onnxruntime, whose native code may read files unseen; use --force when these change"
    )
    assert found.notes == (unseen, variables)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("os.environ['A'], environ['B'], os.environ.get('C'), getenv('D', ''), os.getenv(key='E')",
         ("A", "B", "C", "D", "some")),
        ("os.environ[name], environ.pop('A'), environ.setdefault('B', 'x')", ("some", "A", "B")),
        ("'A' in os.environ, 'B' not in environ", ("A", "B")),
        ("env = os.environ\nenv['A']", ("some",)),
        ("open(os.path.expandvars('$A/x'))", ("some",)),
        ("os.path.expanduser('~/x'), Path.home(), Path('~').expanduser()", ("HOME",)),
        ("dict(os.environ), {**os.environ}, os.environ.copy(), os.environb[b'A']", ("some",)),
        ("for name in os.environ: pass", ("some",)),
        ("from os import environ as e, getenv as g", ("some",)),
        ("get = os.environ.get\nget('A')", ("some",)),
        ("os.environ['A'] = '1'\ndel os.environ['B']\nfrom os import environ\nimport os", ()),
        ("environment['A'], self.env['B'], 'os.environ', self.home", ()),
        ("this is no Python", ()),
    ],
)  # fmt: skip
def test_every_way_to_read_an_environment_variable_is_seen(source, names):
    found = environment_variables(source.encode())
    assert (set(found), len(found)) == (set(names), len(names))


@pytest.mark.parametrize(("before", "now", "written", "moved"), [
    ({"read a": "absent"}, {}, (), ()),  # looked for by an import that is not repeated
    ({"read a": "absent"}, {"read a": "1"}, (), ("a, read by the job's code, changed",)),
    ({"read a": "absent"}, {"read a": "1"}, ("read a",), ()),
    ({"read a": "1"}, {}, (), ("a, read by the job's code, removed",)),
    ({"read a": "1"}, {"read a": "2"}, (), ("a, read by the job's code, changed",)),
    ({}, {"read a": "1", "listing b": "1"}, (), ()),
    ({"presence a": "absent", "status b": "a file"}, {"presence a": "a file", "status b": "absent"}, (), ()),
    ({"weights": "1"}, {"weights": "2"}, (), ("weights changed",)),
    ({"weights": "absent"}, {}, (), ("weights removed",)),
])  # fmt: skip
def test_what_moved_while_a_job_was_built(before, now, written, moved):
    assert Ingredients(now).moved_since(before, written) == moved


def test_an_empty_class_folder_is_a_change(tmp_path):
    """It is a class: it numbers the ones after it, or is refused."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").touch()
    before = Digests().folder(tmp_path)
    (tmp_path / ".git").mkdir()
    assert Digests().folder(tmp_path) == before
    (tmp_path / "b").mkdir()
    assert Digests().folder(tmp_path) != before


def test_looking_imports_no_torch(folder):
    path = nights.write_job(folder, "a")
    script = f"""
import sys
from typing import get_args
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import this_machine
from trtpipe.pipeline.cache.keys import Survey
from trtpipe.job.load import read_job
from trtpipe.job.sections import Correction
digests = Digests()
assert Survey(digests, this_machine(digests)).ingredients(read_job({str(path)!r})).parts["source net"]
assert not {{"torch", "net", "onnx", "tensorrt_rtx"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=nights.environment())


def test_a_gpu_counts_for_what_pytorch_computes_unless_that_is_on_the_cpu(folder, monkeypatch):
    other = dataclasses.replace(MACHINE, gpu="RTX 5090 12.0")
    changed = {n for n in ALL if getattr(look(folder)[1], n) != getattr(look(folder, machine=other)[1], n)}
    assert changed == ALL - {"model"}
    monkeypatch.setenv("TRTPIPE_DEVICE", "cpu")
    on_cpu = look(folder)[1]
    changed = {n for n in ALL if getattr(on_cpu, n) != getattr(look(folder, machine=other)[1], n)}
    assert changed == {"engine"}
    none = dataclasses.replace(MACHINE, gpu="none")
    with_variable = look(folder, machine=none)[1]
    monkeypatch.delenv("TRTPIPE_DEVICE")
    assert look(folder, machine=none)[1] == with_variable


FORMATS = (
    "int8_mode: true", "fp8_mode: true", "nvfp4_mode: true", "int8_mode: true, fp8_mode: true",
    "fp16_mode: true, int8_mode: true", "fp16_mode: true, fp8_mode: true, weights: int4",
)  # fmt: skip
CORRECTIONS = ("", "corrections: true", "corrections: false", "corrections: [bias]", "corrections: [rounding, bias]")


def test_two_jobs_share_a_table_where_they_correct_the_same_operations_and_nowhere_else(folder):
    jobs = []
    for precision in (*FORMATS, "int8_mode: true, keep: {fp32: ['6']}", "int8_mode: true, keep: {fp32: ['4']}"):
        for given in CORRECTIONS:
            path = nights.write_job(folder, "a", f"precision: {{{precision}}}\n")
            path.write_text(path.read_text().replace("algorithm: minmax", f"algorithm: minmax, {given}"))
            job = read_job(path)
            corrected = (job.corrections, job.precision.fp16_mode, job.precision.keep.fp32) if job.corrections else ()
            jobs.append((corrected, stage_keys(job, Survey(Digests(), MACHINE).ingredients(job)).calibration))
    assert {c[0] for c, _ in jobs if c} == {("bias",), ("rounding", "bias"), get_args(Correction)}
    assert len({k for _, k in jobs}) == len(set(jobs)) == len({c for c, _ in jobs})


def test_a_plugins_content_counts_from_the_graph_on(folder):
    (folder / "libtwice.so").write_bytes(b"one")
    extra = "build: {target: tensorrt, plugins: [libtwice.so]}\n"
    before, keys = look(folder, extra)
    (folder / "libtwice.so").write_bytes(b"another")
    after, other = look(folder, extra)
    assert changed(keys, other) == {"graph", "engine"}
    assert after.changes(before.parts) == ("plugin libtwice.so changed",)
    (folder / "lib").mkdir()
    (folder / "libtwice.so").rename(folder / "lib" / "libtwice.so")
    moved, same = look(folder, "build: {target: tensorrt, plugins: [lib/libtwice.so]}\n")
    assert moved.key == after.key
    assert changed(other, same) == set()


def test_a_module_of_several_callables_is_said_once():
    parts = {f"{what}source net": "1" for what in ("", "check ", "calibration ")} | {"weights": "2"}
    now = Ingredients({name: value + "0" for name, value in parts.items()})
    assert now.changes(parts) == ("weights changed", "source of net changed")


@pytest.mark.parametrize("lost", [(), ("read a.pt",), ("read a.pt", "listing data")])
@pytest.mark.parametrize("changed", [(), ("source net",), ("weights", "source net")])
def test_files_whose_reading_is_unknown_are_no_reason_by_themselves(lost, changed):
    """Code that never ran has no record of what it reads: its files were not removed, and nobody knows about them."""
    before = {"source net": "1", "weights": "2", "read a.pt": "3", "listing data": "4"}
    now = {n: f"{v}, other" if n in changed else v for n, v in before.items() if n not in lost}
    said = {"weights": "weights changed", "source net": "source of net changed"}
    unknown = ("the record of what the job's code reads is lost",) if lost else ()
    assert Ingredients(now).reasons(before) == (tuple(said[n] for n in changed) or unknown)
