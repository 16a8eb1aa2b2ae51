import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import shipping
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from trtpipe.cli.main import main
from trtpipe.cli.starter import _plain
from trtpipe.job.json_schema import job_schema
from trtpipe.job.load import read_job
from trtpipe.job.yamlfile import parse


def made(folder, capsys, *options):
    """What `trtpipe init` printed."""
    assert main(["init", str(folder), *options]) == 0
    return capsys.readouterr().out


def test_it_validates_and_says_what_to_do_next(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = made(tmp_path / "first", capsys).splitlines()
    assert lines == [
        "wrote first/model.py",
        "wrote first/job.schema.json",
        "wrote first/job.yaml",
        "wrote 48 made-up images in first/data; put your own there",
        "next: trtpipe validate first/job.yaml && trtpipe build first/job.yaml",
    ]
    assert main(["validate", "first/job.yaml"]) == 0
    job = read_job("first/job.yaml")
    assert (job.name, job.model.factory, job.precision.int8_mode) == ("first", "model:build", True)
    assert json.loads((tmp_path / "first/job.schema.json").read_text()) == job_schema()
    assert (tmp_path / "first/job.yaml").read_text().startswith("# yaml-language-server: $schema=job.schema.json\n")


def test_commands_to_paste_are_quoted_for_the_shell(tmp_path, capsys, monkeypatch):
    """Each place that prints one makes it by `shell`: init, keygen, and refusals of kits, bundles and archives."""
    monkeypatch.chdir(tmp_path)
    folder = "my model's"
    assert made(Path(folder), capsys).splitlines()[-1] == (
        """next: trtpipe validate 'my model'"'"'s/job.yaml' && trtpipe build 'my model'"'"'s/job.yaml'"""
    )
    assert main(["keygen", "my key"]) == 0
    assert "sign with: trtpipe build --sign 'my key')" in capsys.readouterr().err
    assert main(["keygen", "--fleet", "my fleet"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    for line in said[1:]:
        words = shlex.split(line.partition(": ")[2])
        assert all(Path(word).exists() for word in words if word.startswith("my fleet"))
        assert sum(word.startswith("my fleet") for word in words) == (3 if "scheduler:" in line else 1)
    shipping.bundle(tmp_path / "a b")
    assert main(["pack", "a b", "a b.trtb"]) == 0
    assert main(["inspect", "a b.trtb"]) == 2
    assert "Run `trtpipe unpack 'a b.trtb' FOLDER`." in capsys.readouterr().err
    assert main(["build", "a b"]) == 2
    assert "Run it: trtpipe run 'a b'." in capsys.readouterr().err


def test_the_made_up_images_are_images_and_the_same_every_time(tmp_path, capsys):
    for name in ("a", "b"):
        made(tmp_path / name, capsys)
    pictures = sorted((tmp_path / "a" / "data").rglob("*.png"))
    assert len(pictures) == 48
    for picture in pictures:
        with Image.open(picture) as image:
            assert image.size == (64, 64)
        assert picture.read_bytes() == (tmp_path / "b" / picture.relative_to(tmp_path / "a")).read_bytes()
    calib = {p.read_bytes() for p in pictures if "calib" in p.parts}
    assert not calib & {p.read_bytes() for p in pictures if "val" in p.parts}


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "model.py").write_text("mine")
    made(tmp_path, capsys)
    assert (tmp_path / "model.py").read_text() == "mine"
    assert main(["init", str(tmp_path)]) == 2
    expected = f"{tmp_path / 'job.yaml'}: must not be there yet (got a file). Choose another folder.\n"
    assert capsys.readouterr().err == expected
    assert main(["init", str(tmp_path / "model.py")]) == 2
    reason = "a part of this path is a file, not a folder. Check the path."
    assert capsys.readouterr().err == f"{tmp_path / 'model.py'}: {reason}\n"


def test_from_a_module_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    made(tmp_path / "job", capsys, "--from", "mine:build")
    job = read_job(tmp_path / "job" / "job.yaml")
    assert (job.model.factory, job.model.args) == ("mine:build", {})
    assert main(["validate", "job/job.yaml"]) == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("resnet50", "--from: must be timm:<model> or package.module:callable (got 'resnet50')."),
        (
            "no_such:build",
            "--from: must name a module that can be found (got 'no_such'). Install it, or put it beside the job file.",
        ),
        (
            "trtpipe.job.problems:violatio",
            "--from: must name something that trtpipe.job.problems defines (got 'violatio'). Did you mean violation?",
        ),
    ],
)
def test_a_source_that_is_none(source, message, tmp_path, capsys):
    assert main(["init", str(tmp_path / "x"), "--from", source]) == 2
    assert capsys.readouterr().err == f"{message}\n"
    assert not (tmp_path / "x").exists()


@pytest.fixture
def timm(monkeypatch):
    """timm's own answers for one model, without the seconds that importing it takes."""
    config = SimpleNamespace(input_size=(3, 380, 380), crop_pct=0.922, interpolation="bicubic",
                             mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))  # fmt: skip
    fake = SimpleNamespace(
        is_model=lambda name: name == "tf_efficientnet_b4",
        list_models=lambda: ["resnet50", "tf_efficientnet_b4"],
        get_pretrained_cfg=lambda name: config,
    )
    monkeypatch.setitem(sys.modules, "timm", fake)


def test_from_timm(timm, tmp_path, capsys):
    made(tmp_path / "job", capsys, "--from", "timm:tf_efficientnet_b4")
    job = read_job(tmp_path / "job" / "job.yaml")
    assert job.name == "tf_efficientnet_b4"
    assert job.model.args == {"model_name": "tf_efficientnet_b4", "pretrained": True}
    assert job.inputs["image"].shape == ("N", 3, 380, 380)
    transform = job.check_transform()
    assert (transform.resize, transform.center_crop, transform.interpolation) == (412, (380, 380), "bicubic")
    assert transform.normalize.std == (0.229, 0.224, 0.225)
    assert not (tmp_path / "job" / "model.py").exists()


def test_a_model_that_timm_has_not(timm, tmp_path, capsys):
    assert main(["init", str(tmp_path / "x"), "--from", "timm:resnet5"]) == 2
    expected = "--from: must be a model that timm has (got 'resnet5'). Did you mean resnet50?\n"
    assert capsys.readouterr().err == expected


def test_timm_is_not_installed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["init", str(tmp_path / "x"), "--from", "timm:resnet50"]) == 3
    expected = "--from: timm is not installed. Run: pip install 'trtpipe[examples]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("parts", "calibrate_on", "check_on"),
    [
        (("train", "val"), "train", "val"),
        (("calib", "train", "test"), "calib", "test"),
        (("val",), "val", "val"),
        (("cats", "dogs"), "", ""),
    ],
)
def test_ones_own_images(parts, calibrate_on, check_on, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in parts:
        (tmp_path / "pictures" / part / "x").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / part / "x" / "a.jpg")
    assert "made-up" not in made(tmp_path / "job", capsys, "--images", "pictures")
    job = read_job("job/job.yaml")
    assert job.calibration.images == str(tmp_path / "pictures" / calibrate_on).rstrip("/")
    assert job.check.images == str(tmp_path / "pictures" / check_on).rstrip("/")
    assert "images: ../pictures" in (tmp_path / "job" / "job.yaml").read_text()
    assert not (tmp_path / "job" / "data").exists()


def test_images_that_are_none(tmp_path, capsys):
    assert main(["init", str(tmp_path / "x"), "--images", str(tmp_path / "nowhere")]) == 2
    expected = f"--images: must be a folder of images (got '{tmp_path / 'nowhere'}').\n"
    assert capsys.readouterr().err == expected
    assert main(["init", str(tmp_path / "x"), "--images", str(tmp_path)]) == 2
    assert "--images: holds no image (.jpg, " in capsys.readouterr().err


def test_json(tmp_path, capsys):
    found = json.loads(made(tmp_path / "a", capsys, "--json"))
    assert found["job"] == str(tmp_path / "a" / "job.yaml")
    assert len(found["written"]) == 51


def test_what_it_writes_builds(tmp_path, capsys):
    made(tmp_path / "first", capsys)
    done = subprocess.run(
        [sys.executable, "-m", "trtpipe", "build", "first", "-o", "out", "--json"],
        capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["check"]["passed"] is True
    assert (tmp_path / "out" / "first" / "manifest.json").is_file()


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
@example(text="Füße 猫")
@example(text="a\u2028b\x85c")
@example(text="\U0001f408")
@example(text="yes")
@example(text="a: b # c")
def test_any_text_is_read_back_from_the_job_as_it_was(text):
    assert parse(f"k: {{a: {_plain(text)}}}").data == {"k": {"a": text}}


def test_a_folder_with_letters_of_any_language_is_written_as_people_read_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        (tmp_path / "Füße 猫" / part / "a").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "Füße 猫" / part / "a" / "1.png")
    made(tmp_path / "start", capsys, "--images", "Füße 猫")
    assert 'images: "../Füße 猫/train"' in (tmp_path / "start" / "job.yaml").read_text(encoding="utf-8")
    assert read_job(tmp_path / "start" / "job.yaml").check.images == str(tmp_path / "Füße 猫" / "val")
