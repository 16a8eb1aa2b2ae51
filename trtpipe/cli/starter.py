"""The job that `trtpipe init` writes. It asks nothing: whatever a job needs is found out or has a default."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import yaml
from PIL import Image, ImageDraw

from calib.algorithms import ALGORITHMS
from calib.folders import has_images
from calib.samples import IMAGE_SUFFIXES, Interpolation
from trtpipe.atomic import write_whole
from trtpipe.errors import InputError, MissingError, did_you_mean
from trtpipe.job.importable import is_reference, missing
from trtpipe.job.json_schema import job_schema
from trtpipe.job.problems import violation
from trtpipe.job.yamlfile import scalar
from trtpipe.packages import not_installed
from trtpipe.trt.flavour import installed
from trtpipe.values import Target

#: What it writes, and where it puts images of its own.
JOB, DATA = "job.yaml", "data"
#: Names of folders with calibration images and with check images, in order of preference.
CALIBRATE_ON = ("calib", "calibration", "train")
CHECK_ON = ("val", "valid", "validation", "test")


@dataclass(frozen=True)
class StarterSource:
    """Where the network comes from, and the images it takes."""

    factory: str
    args: Mapping[str, str | int | bool]
    about: str
    shape: tuple[int, int, int]
    transform: str
    output: str = "logits"


def starter(folder: Path, source: str | None = None, images: Path | None = None) -> tuple[Path, ...]:
    """Write a commented job into `folder`, with everything it needs that is not given, and return the files written.

    Args:
        folder: made if it is not there; a job file in it is never overwritten.
        source: `timm:<model>` or `package.module:callable`; None writes a small model.py to start from.
        images: a folder of images, or one with parts like train and val; None makes a few stand-ins.

    Raises:
        InputError: `source` or `images` is invalid, or `folder` has a job.yaml already.
        MissingError: `source` is a timm model and timm is not installed.
    """
    job = folder / JOB
    if job.exists():
        raise InputError(f"{job}: {violation('not be there yet', 'a file', 'Choose another folder.')}")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: {violation('be a folder', 'a file')}")
    network = _source(source, folder)
    files: dict[Path, bytes] = {}
    if source is None:
        files[folder / "model.py"] = _MODEL.encode()
    if images is None:
        files |= {folder / DATA / name: data for name, data in _pictures().items()}
        calibrate_on, check_on = f"{DATA}/calib", f"{DATA}/val"
    else:
        calibrate_on, check_on = (_from(folder, part) for part in _parts(images))
    name = _name(folder, source)
    files[folder / "job.schema.json"] = (json.dumps(job_schema(), indent=2) + "\n").encode()
    files[job] = _job(name, network, calibrate_on, check_on, images is None).encode()
    for path, data in files.items():
        if not path.exists():
            write_whole(path, data)
    return tuple(files)


def _source(source: str | None, folder: Path) -> StarterSource:
    imagenet = (
        "{resize: 256, center_crop: [224, 224], normalize: {mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}"
    )
    if source is None:
        halves = "{resize: [64, 64], normalize: {mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}}"
        about = "model.py beside this file; or any package.module:callable that returns an nn.Module"
        return StarterSource(
            "model:build",
            {"num_classes": 2},
            about,
            (3, 64, 64),
            halves,
        )
    if source.startswith("timm:"):
        return _timm(source.removeprefix("timm:"))
    if not is_reference(source):
        raise InputError(f"--from: {violation('be timm:<model> or package.module:callable', repr(source))}")
    if absent := missing(source, (folder, Path.cwd())):
        raise InputError(f"--from: {violation(*absent)}")
    return StarterSource(source, {}, "returns an nn.Module", (3, 224, 224), imagenet, "output")


def _timm(name: str) -> StarterSource:
    """A model of timm, with the image size, crop and normalization of its configuration."""
    try:
        import timm
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise MissingError(f"--from: {not_installed('timm')}") from None
    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        raise InputError(f"--from: {violation('be a model that timm has', repr(name), near)}")
    config = timm.get_pretrained_cfg(name)
    channels, height, width = (3, 224, 224) if config is None else config.input_size
    resize = round(height / config.crop_pct) if config is not None and config.crop_pct else height
    interpolation = config.interpolation if config is not None else "bilinear"
    mean, std = ((0.5,) * 3, (0.5,) * 3) if config is None else (config.mean, config.std)
    transform = (
        f"{{resize: {resize}, center_crop: [{height}, {width}], "
        f"interpolation: {interpolation if interpolation in get_args(Interpolation) else 'bicubic'}, "
        f"normalize: {{mean: {_numbers(mean)}, std: {_numbers(std)}}}}}"
    )
    about = "pretrained: true downloads timm's weights; false makes random ones"
    args: dict[str, str | int | bool] = {"model_name": name, "pretrained": True}
    return StarterSource("timm:create_model", args, about, (channels, height, width), transform)


def _numbers(values: Iterable[float]) -> str:
    return f"[{', '.join(f'{float(v):.6g}' for v in values)}]"


def _parts(images: Path) -> tuple[Path, Path]:
    """The folders to calibrate on and to check on: subfolders of `images` by their names, else all of it for both."""
    if not images.is_dir():
        raise InputError(f"--images: {violation('be a folder of images', repr(str(images)))}")
    if not has_images(images):
        raise InputError(f"--images: holds no image ({', '.join(IMAGE_SUFFIXES)}). Check the path.")
    calibrate_on = next((images / n for n in CALIBRATE_ON if (images / n).is_dir()), None)
    check_on = next((images / n for n in CHECK_ON if (images / n).is_dir()), None)
    return calibrate_on or check_on or images, check_on or calibrate_on or images


def _from(folder: Path, path: Path) -> str:
    """`path` as a job file in `folder` names it: relative when both are below the current folder."""
    here, target = Path.cwd(), path.resolve()
    if folder.resolve().is_relative_to(here) and target.is_relative_to(here):
        return os.path.relpath(target, folder.resolve())
    return str(target)


def _name(folder: Path, source: str | None) -> str:
    if source is not None and source.startswith("timm:"):
        return source.removeprefix("timm:").replace("/", "-")
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in folder.resolve().name)
    return name.strip("._-") or "job"


def _pictures() -> dict[str, bytes]:
    """A few stand-ins for images: squares and circles, 64 x 64, the same every time."""
    chance = random.Random(0)
    pictures: dict[str, bytes] = {}
    for part, count in (("calib", 16), ("val", 8)):
        for kind in ("circle", "square"):
            for number in range(count):
                picture = Image.new("RGB", (64, 64), tuple(chance.randrange(96) for _ in range(3)))
                size, x, y = chance.randrange(16, 40), chance.randrange(24), chance.randrange(24)
                paint = ImageDraw.Draw(picture)
                draw = paint.ellipse if kind == "circle" else paint.rectangle
                draw((x, y, x + size, y + size), fill=tuple(chance.randrange(128, 256) for _ in range(3)))
                data = io.BytesIO()
                picture.save(data, "PNG")
                pictures[f"{part}/{kind}/{number:02d}.png"] = data.getvalue()
    return pictures


def _plain(value: object) -> str:
    """A value as YAML: text without quotes where it reads back as it is."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/.][A-Za-z0-9/._-]*", value) and scalar(value) == value:
        return value
    if isinstance(value, str):
        return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).strip()
    return json.dumps(value)


def _target() -> str:
    """The TensorRT that is installed; TensorRT-RTX, which builds anywhere, when there is none or both."""
    return "tensorrt" if set(installed()) == {"tensorrt"} else "tensorrt_rtx"


def _job(name: str, source: StarterSource, calibrate_on: str, check_on: str, made_up: bool) -> str:
    channels, height, width = source.shape
    args = ", ".join(f"{key}: {_plain(value)}" for key, value in source.args.items())
    notes = "   # stand-ins: put your own here, one folder for each class" if made_up else ""
    return f"""\
# yaml-language-server: $schema=job.schema.json
# `trtpipe validate` says what is wrong with this file, `trtpipe build` makes the engine.
# Paths are relative to this file.
name: {_plain(name)}

model:
  factory: {source.factory}   # {source.about}
  args: {{{args}}}
  # weights: weights.safetensors   # a state dict: .safetensors, or .pt

inputs:
  # The names, types and shapes of the engine's inputs, in the model's order. N is any batch from min to max.
  image: {{dtype: float32, shape: [N, {channels}, {height}, {width}], N: {{min: 1, opt: 8, max: 32}}}}

outputs:
  {source.output}: {{dtype: float32}}   # one line for each output, in the model's order

precision:
  fp16_mode: true
  int8_mode: true
  # keep: {{fp32: ["head.*"]}}   # modules that stay out of INT8, by glob

calibration:
  # The ranges of INT8 are observed on these images.
  images: {_plain(calibrate_on)}{notes}
  transform: {source.transform}
  # samples: 512
  # algorithm: {ALGORITHMS[0]}   # or {", ".join(ALGORITHMS[1:])}

build:
  target: {_target()}   # one of {", ".join(get_args(Target))}
  # compute_capability: [8.6, 8.9, 12.0]   # tensorrt_rtx: only these GPUs; otherwise every one since Ampere

check:
  # The result is compared with the TorchScript baseline on these images, transformed as above.
  images: {_plain(check_on)}{notes}
  limits:
    cosine_min: 0.98
    sqnr_db_min: 15   # 20 log10 of |baseline| / |difference|
    # top1_agreement_min: 0.98
    # accuracy_drop_max: 0.01   # the folders name the classes, and the model knows them in that order
"""


_MODEL = '''\
"""A small network to start from; put your own here."""

import torch
from torch import nn


def build(num_classes: int) -> nn.Module:
    """What the job's model.factory calls with model.args."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes, bias=False),
    )
'''
