"""verify, check, run, pack, unpack, export and keygen, each as a user calls it."""

from __future__ import annotations

import csv
import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import shipping
from PIL import Image

from trtpipe.bundle import format as format_
from trtpipe.bundle import signing
from trtpipe.bundle.format import read_bundle
from trtpipe.cli.commands import inspect
from trtpipe.cli.main import main
from trtpipe.job import yamlfile
from trtpipe.job.limits import Limits
from trtpipe.job.sections import Build
from trtpipe.runtime import compatibility

COLOURS = {"red": (250, 10, 20), "green": (5, 200, 30), "blue": (0, 40, 180)}


class Ran(NamedTuple):
    """What one command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def trtpipe(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> Ran:
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            # The third red one is green.
            shown = COLOURS["green"] if (name, i) == ("red", 2) else colour
            Image.new("RGB", (20, 16 + i), shown).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def test_keygen_sign_verify(tmp_path: Path, trtpipe: Any) -> None:
    made = trtpipe("keygen", tmp_path / "key")
    assert made.code == 0
    assert made.out == ""
    assert "PRIVATE" not in made.err
    assert f"public key: {tmp_path / 'key.pub'}, id " in made.err
    assert trtpipe("keygen", tmp_path / "key").code == 2
    shipping.bundle(tmp_path / "c", sign=signing.signer(tmp_path / "key"))
    good = trtpipe("verify", tmp_path / "c", "--key", tmp_path / "key.pub")
    assert good.code == 0, good.err
    lines = good.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'c'}: bundle colour, 3 files whole, signed by key ")
    assert lines[1] == "fits this device"
    assert lines[2].startswith("note: ONNX Runtime is ")
    assert lines[3].startswith("passed: graph executed by onnxruntime ")
    assert lines[3].endswith(" on 4 golden samples")
    shipping.bundle(tmp_path / "u")
    refused = trtpipe("verify", tmp_path / "u", "--key", tmp_path / "key.pub")
    assert refused.code == 2
    assert f"{tmp_path / 'u'}: must be signed by a key in" in refused.err


def test_a_configured_key_is_used_by_every_command(
    tmp_path: Path, trtpipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipping.bundle(tmp_path / "u")
    assert trtpipe("pack", tmp_path / "u").code == 0
    monkeypatch.setenv(signing.KEY_VARIABLE, str(signing.generate_key(tmp_path / "key")))
    commands: list[tuple[object, ...]] = [
        ("verify", tmp_path / "u"),
        ("check", tmp_path / "u"),
        ("run", tmp_path / "u", "--benchmark"),
        ("bench", tmp_path / "u", "--rounds", 1),
        ("export", tmp_path / "u", "--to", "triton", tmp_path / "r"),
        ("unpack", tmp_path / "u.trtb", tmp_path / "made"),
    ]
    for command in commands:
        ran = trtpipe(*command)
        assert ran.code == 2, command
        assert "must be signed by a key in" in ran.err
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "r").exists()


def test_only_inspect_reads_a_bundle_without_asking_who_signed_it() -> None:
    commands = Path(main.__code__.co_filename).parent / "commands"
    assert [p.name for p in sorted(commands.glob("*.py")) if "read_bundle" in p.read_text()] == ["inspect.py"]


def test_a_name_of_a_class_does_not_steer_the_terminal(tmp_path: Path, trtpipe: Any, photos: Path) -> None:
    shipping.bundle(tmp_path / "c", class_names=("\x1b[2J", "\x9bm", "blue\r"))
    for form in ("csv", "jsonl"):
        ran = trtpipe("run", tmp_path / "c", photos, "--format", form, "-q")
        assert ran.code == 0
        assert not [c for c in ran.out if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]
        if form == "jsonl":
            assert {json.loads(line)["label"] for line in ran.out.splitlines()} == {"\x1b[2J", "\x9bm", "blue\r"}
    out = trtpipe("run", tmp_path / "c", photos, "--format", "csv", "-q").out
    assert {line.split(",")[3] for line in out.splitlines()[1:]} == {"\\x1b[2J", "\\x9bm", "blue\\x0d"}


@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_more_classes_than_there_are_is_refused(tmp_path: Path, trtpipe: Any, photos: Path, form: str) -> None:
    shipping.bundle(tmp_path / "c")
    ran = trtpipe("run", tmp_path / "c", photos, "--format", form, "--top", 4)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "--top: must be at most 3, the classes of output logits (got 4).\n"
    assert trtpipe("run", tmp_path / "c", photos, "--format", form, "--top", 3).code == 0


@pytest.mark.parametrize(("form", "lines"), [("jsonl", 9), ("csv", 10)])
def test_lines_before_a_bad_sample_are_whole(tmp_path: Path, trtpipe: Any, photos: Path, form: str, lines: int) -> None:
    """What is appended to them later begins a line of its own."""
    shipping.bundle(tmp_path / "c")
    (photos / "zz.png").write_bytes(b"no image")
    ran = trtpipe("run", tmp_path / "c", photos, "--format", form, "-q", "--batch-size", 1)
    assert ran.code == 2
    assert ran.out.endswith("\n")
    assert len(ran.out.splitlines()) == lines


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_bad_sample_of_a_file_is_named_by_its_place_in_the_file(tmp_path: Path, trtpipe: Any, size: int) -> None:
    shipping.bundle(tmp_path / "c")
    arrays = np.zeros((20, 3, 8, 8), np.float32)
    arrays[17, 1, 2, 3] = np.nan
    np.save(tmp_path / "x.npy", arrays)
    ran = trtpipe("run", tmp_path / "c", tmp_path / "x.npy", "-q", "--batch-size", size)
    assert ran.code == 2
    assert "(got NaN or infinity in x.npy[17]). Leave it out" in ran.err


def test_a_batch_beyond_the_largest_is_refused(tmp_path: Path, trtpipe: Any, photos: Path) -> None:
    shipping.bundle(tmp_path / "c")
    ran = trtpipe("run", tmp_path / "c", photos, "--batch-size", 9)
    assert (ran.code, ran.err) == (2, "--batch-size: must be at most 8, the bundle's largest (got 9).\n")


@pytest.mark.parametrize("command", ["build '' -o out", "run c x.png -o ''", "validate job.yaml --set ''"])
def test_an_empty_argument_is_refused(tmp_path: Path, trtpipe: Any, command: str) -> None:
    ran = trtpipe(*shlex.split(command))
    assert ran.code == 2
    assert ran.err.splitlines()[-1] == (
        "Error: an argument is empty. Give it a value: is a variable of the shell not set?"
    )


@pytest.mark.parametrize(
    ("command", "found"),
    [("verify c --no-run", False), ("inspect c", False), ("pack c", False), ("build c -o out", False),
     ("bench c --rounds 1", False), ("validate job.yaml", True), ("build job.yaml", True), ("bench job.yaml", True)],
)  # fmt: skip
def test_modules_beside_a_bundle_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtpipe: Any, command: str, found: bool
) -> None:
    """Whoever brings a bundle may bring a `tensorrt.py` too; the callables of a job are found in the current folder."""
    shipping.bundle(tmp_path / "c")
    (tmp_path / "job.yaml").write_text("name: [")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    seen: list[bool] = []

    def watched(real: Any) -> Any:
        def looking(*given: Any, **more: Any) -> Any:
            seen.append(str(tmp_path) in sys.path)
            return real(*given, **more)

        return looking

    for module in (format_, compatibility, inspect):
        monkeypatch.setattr(module, "read_bundle", watched(module.read_bundle))
    monkeypatch.setattr(yamlfile, "parse", watched(yamlfile.parse))
    trtpipe(*command.split())
    assert set(seen) <= {found}
    assert seen or command == "pack c"
    assert str(tmp_path) not in sys.path


def test_verify_says_each_mismatch_and_json(tmp_path: Path, trtpipe: Any) -> None:
    shipping.bundle(tmp_path / "k", kind="kit", engine=None, build=Build(target="tensorrt"))
    ran = trtpipe("verify", tmp_path / "k")
    assert ran.code == 3
    assert "mismatch: " in ran.out
    assert "TensorRT" in ran.out
    found = json.loads(trtpipe("verify", tmp_path / "k", "--json").out)
    assert (found["kind"], found["signature"], found["exit_code"], found["check"]) == ("kit", "unsigned", 3, None)
    assert len(found["mismatches"]) == 1


def test_wrong_answers_are_exit_code_1(tmp_path: Path, trtpipe: Any) -> None:
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_from_string(shipping.graph())
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(shipping.weights()[:, ::-1].copy(), "w"))
    shipping.bundle(tmp_path / "w", extra={"model.onnx": proto.SerializeToString()})
    for command in ("verify", "check"):
        ran = trtpipe(command, tmp_path / "w")
        assert ran.code == 1
        assert "FAILED: graph executed by onnxruntime" in ran.out
    assert trtpipe("verify", tmp_path / "w", "--no-run").code == 0


def test_check_json(tmp_path: Path, trtpipe: Any) -> None:
    shipping.bundle(tmp_path / "c", limits=Limits(cosine_min=0.99, top1_agreement_min=0.9))
    ran = trtpipe("check", tmp_path / "c", "--json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert report["passed"] is True
    assert report["samples"] == 4
    text = trtpipe("check", tmp_path / "c").out
    assert "note: top1_agreement_min is a share of samples, and was not judged on 4" in text


def test_run_a_folder(tmp_path: Path, trtpipe: Any, photos: Path) -> None:
    shipping.bundle(tmp_path / "c")
    ran = trtpipe("run", tmp_path / "c", photos, "--batch-size", 2)
    assert ran.code == 0, ran.err
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert [r["id"] for r in rows] == [f"{c}/{i}.png" for c in ("blue", "green", "red") for i in range(3)]
    assert [r["label"] for r in rows] == ["blue"] * 3 + ["green"] * 3 + ["red"] * 2 + ["green"]
    assert [r["truth"] for r in rows] == ["blue"] * 3 + ["green"] * 3 + ["red"] * 3
    assert rows[0]["index"] == 2
    assert rows[0]["score"] == pytest.approx((180 / 255 - 0.5) / 0.5, abs=1e-6)
    assert "accuracy 0.8889: 8 of 9 labelled samples" in ran.err
    assert trtpipe("run", tmp_path / "c", photos, "-q").err == ""


def test_run_writes_csv_whole_or_not_at_all(tmp_path: Path, trtpipe: Any, photos: Path) -> None:
    shipping.bundle(tmp_path / "c")
    out = tmp_path / "out.csv"
    ran = trtpipe("run", tmp_path / "c", photos, "--format", "csv", "--top", 2, "-o", out)
    assert (ran.code, ran.out) == (0, "")
    rows = list(csv.reader(out.read_text().splitlines()))
    assert rows[0] == ["id", "truth", "index", "label", "score", "index_2", "label_2", "score_2"]
    assert rows[1][:4] == ["blue/0.png", "blue", "2", "blue"]
    assert rows[1][5:7] == ["1", "green"]
    before = out.read_text()
    (photos / "red" / "zz.png").write_bytes(b"no image")
    ran = trtpipe("run", tmp_path / "c", photos, "--format", "csv", "-o", out)
    assert ran.code == 2
    assert "zz.png: must be an image that Pillow reads" in ran.err
    assert out.read_text() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("x.csv", "csv"),
        ("X.CSV", "csv"),
        ("x.json", "json"),
        ("x.jsonl", "jsonl"),
        ("csv", "jsonl"),
    ],
)
def test_the_suffix_of_the_output_is_its_format(
    tmp_path: Path, trtpipe: Any, photos: Path, name: str, form: str
) -> None:
    shipping.bundle(tmp_path / "c")
    lines = trtpipe("run", tmp_path / "c", photos).out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert trtpipe("run", tmp_path / "c", photos, "-o", tmp_path / name).code == 0
    text = (tmp_path / name).read_text()
    if form == "csv":
        header, *cells = csv.reader(text.splitlines())
        assert [dict(zip(header, c, strict=True))["id"] for c in cells] == [r["id"] for r in rows]
    else:
        assert (json.loads(text) if form == "json" else [json.loads(line) for line in text.splitlines()]) == rows
    chosen = tmp_path / f"chosen-{name}"  # what is asked for by name wins
    assert trtpipe("run", tmp_path / "c", photos, "-o", chosen, "--format", "json").code == 0
    assert json.loads(chosen.read_text()) == rows


def test_raw_outputs_are_no_csv_whoever_asks_for_it(tmp_path: Path, trtpipe: Any, photos: Path) -> None:
    shipping.bundle(tmp_path / "c")
    for how in (("--format", "csv"), ("-o", tmp_path / "x.csv")):
        ran = trtpipe("run", tmp_path / "c", photos, "--raw", *how)
        assert ran.code == 2
        assert "--raw must not be given with CSV, which has no columns for outputs (got --raw)." in ran.err


def test_run_one_image_and_arrays(tmp_path: Path, trtpipe: Any, photos: Path) -> None:
    shipping.bundle(tmp_path / "c")
    one = json.loads(trtpipe("run", tmp_path / "c", photos / "red" / "0.png").out)
    assert (one["id"], one["label"], "truth" in one) == ("0.png", "red", False)
    golden = shipping.golden_data()
    np.save(tmp_path / "x.npy", golden.inputs["image"])
    ran = trtpipe("run", tmp_path / "c", tmp_path / "x.npy", "--raw")
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert [r["id"] for r in rows] == [f"x.npy[{i}]" for i in range(4)]
    np.testing.assert_allclose([r["outputs"]["logits"] for r in rows], golden.outputs["logits"], atol=1e-6)


def test_run_benchmark(tmp_path: Path, trtpipe: Any) -> None:
    shipping.bundle(tmp_path / "c")
    found = json.loads(trtpipe("run", tmp_path / "c", "--benchmark", "--iterations", 5, "--batch-size", 7).out)
    assert (found["batch_size"], found["iterations"], found["executed"]) == (7, 5, "graph")
    latency = found["latency_ms"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    assert found["samples_per_s"] == pytest.approx(7 / latency["mean"] * 1e3)


def test_run_needs_something_to_run(tmp_path: Path, trtpipe: Any) -> None:
    shipping.bundle(tmp_path / "c")
    ran = trtpipe("run", tmp_path / "c")
    assert ran.code == 2
    assert "INPUT must be given, unless --benchmark is." in ran.err
    ran = trtpipe("run", tmp_path / "c", "x", "--raw", "--format", "csv")
    assert "--raw must not be given with CSV" in ran.err


def test_pack_and_unpack(tmp_path: Path, trtpipe: Any) -> None:
    shipping.bundle(tmp_path / "c")
    packed = trtpipe("pack", tmp_path / "c")
    assert (packed.code, packed.out) == (0, f"{tmp_path / 'c.trtb'}\n")
    made = trtpipe("unpack", tmp_path / "c.trtb", tmp_path / "d")
    assert (made.code, made.out) == (0, f"{tmp_path / 'd'}\n")
    assert read_bundle(tmp_path / "d").manifest == read_bundle(tmp_path / "c").manifest
    (tmp_path / "c.trtb").rename(tmp_path / "e.trtb")
    assert trtpipe("unpack", tmp_path / "e.trtb").out == f"{tmp_path / 'e'}\n"
    (tmp_path / "e.trtb").rename(tmp_path / "f")
    ran = trtpipe("unpack", tmp_path / "f")
    assert ran.code == 2
    assert "f: does not end in .trtb. Give DESTINATION." in ran.err


def test_export(tmp_path: Path, trtpipe: Any) -> None:
    shipping.bundle(tmp_path / "c")
    ran = trtpipe("export", tmp_path / "c", "--to", "triton", tmp_path / "r")
    assert (ran.code, ran.out) == (0, f"{tmp_path / 'r' / 'colour'}\n")
    assert (tmp_path / "r" / "colour" / "1" / "model.onnx").read_bytes() == shipping.graph()
    assert ran.err == ""


def test_export_says_that_the_check_failed(tmp_path: Path, trtpipe: Any) -> None:
    report = shipping.bundle(tmp_path / "good").manifest.check
    assert report is not None
    shipping.bundle(tmp_path / "c", check=dataclasses.replace(report, passed=False, problems=("it is wrong",)))
    ran = trtpipe("export", tmp_path / "c", "--to", "triton", tmp_path / "r")
    assert ran.code == 0
    assert f"warning: {tmp_path / 'c'}: its check failed when it was made: it is wrong" in ran.err


def test_no_command_for_a_bundle_loads_torch(tmp_path: Path) -> None:
    """verify, run, pack and export with torch, onnx and torchvision out of reach."""
    shipping.bundle(tmp_path / "c")
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 8, 8), np.float32))
    c = str(tmp_path / "c")
    commands = [
        ["verify", c],
        ["run", c, str(tmp_path / "x.npy")],
        ["pack", c],
        ["export", c, "--to", "triton", str(tmp_path / "r")],
        ["keygen", str(tmp_path / "key")],
    ]
    code = f"""
import sys
for name in ("torch", "torchvision", "torchao", "onnx", "onnxscript", "tensorrt", "tensorrt_rtx", "numba"):
    sys.modules[name] = None
from trtpipe.cli.main import main
for command in {commands!r}:
    assert main(command) == 0, command
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
