"""Models of other shapes than one tensor in and one out: each message says what the model did, and what helps."""
# ruff: noqa: E501  (a table)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtpipe.cli.main import main
from trtpipe.job.load import load_job
from trtpipe.pipeline.deep import deep_problems

HEAD = """
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Out:
    logits: torch.Tensor
    loss: object = None


Pair = namedtuple("Pair", "boxes scores")


class Net(nn.Module):
    classes = {classes}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        {body}


def make():
    return Net()
"""
ONE = ("y",)
WRAP = "Return tensors from a wrapper's forward:\n    out = self.model(*inputs)\n    return "
NAME = "Name each of them in the job:\n    outputs:"

#: what forward does with y = Linear(x) -> (the job's outputs, what is wrong: None, or parts of the message)
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    # That go through
    "return y": (ONE, None),
    'return {"y": y, "more": y * 2}': (ONE, None),
    "return [y, y * 2]": (("a", "b"), None),
    "return Pair(y, y * 2)": (("a", "b"), None),
    "return y.mean()": (ONE, None),
    "return y.argmax(1)": (ONE, None),
    "return y > 0": (ONE, None),
    "return torch.where(y.sum() > 0, y, -y)": (ONE, None),
    # What is returned is not what the job names
    'return {"boxes": [y, y]}': (
        ("boxes",),
        ("it returns a dict of boxes: a list of 2 (float32 [2, 4], float32 [2, 4])", WRAP + 'out["boxes"][0], out["boxes"][1]'),
    ),
    'return {"boxes": y, "scores": y}': (
        ONE,
        ("got y, and it returns a dict of boxes: float32 [2, 4], scores: float32 [2, 4]", NAME + "\n      boxes: {}\n      scores: {}"),
    ),
    "return Out(y)": (ONE, ("it returns Out(logits: float32 [2, 4], loss: None)", WRAP + "out.logits")),
    "return Pair(y, [y])": (ONE, ("it returns Pair(boxes: float32 [2, 4], scores: a list of 1", WRAP + "out.boxes, out.scores[0]")),
    "return y, y, y": (ONE, ("it returns a tuple of 3", NAME + "\n      output_0: {}\n      output_1: {}\n      output_2: {}")),
    "return y, None": (ONE, ("it returns a tuple of 2 (float32 [2, 4], None)", WRAP + "out[0]")),
    "return [{'boxes': y[0]}, {'boxes': y[1]}]": (ONE, (WRAP + 'out[0]["boxes"], out[1]["boxes"]',)),
    "return None": (ONE, ("it returns None", "Return tensors from its forward.")),
    "return float(y.sum())": (ONE, ("it returns float()", "Return tensors from its forward.")),
    "return y.clone()": (("a", "b"), ("got a, b, and it returns float32 [2, 4]",)),
    # What the model does cannot be run or captured
    "return self.a(y.reshape(-1, 8))": (ONE, ("model: it fails on zeros of the declared inputs (x float32 [2, 4]) at ", "RuntimeError")),
    "return y if x.sum() > 0 else -y": (ONE, ("capture: the model decides by the values of a tensor at ", "y = torch.where(condition, a, b)")),
    "return y[: int(x.abs().sum()) + 1]": (ONE, ("capture: ",)),
    "return y.reshape(2, 4)": (ONE, ("model: it fails on zeros of the declared inputs (x float32 [3, 4]) at ", "reshape(2, 4)")),
    "return y[y[:, 0] > 0]": (ONE, ("outputs.y: its shape depends on the data", "topk(k)")),
    "return y.squeeze(0) if len(y) == 1 else y.unsqueeze(0)[0]": (ONE, ("outputs: each must have one rank", "squeeze(dim)")),
    "return y.numpy().sum()": (ONE, ("outputs: must be the tensors that the model returns",)),
    "raise ValueError('no weights')": (ONE, ("model: it fails on zeros of the declared inputs", "ValueError: no weights")),
    "return torch.nonzero(y)": (ONE, ("shape",)),
}  # fmt: skip


def job(folder: Path, body: str, outputs: tuple[str, ...], name: str, **changes: Any) -> Path:
    (folder / f"{name}.py").write_text(HEAD.replace("{body}", body).replace("{classes}", "None"))
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32))
    text: dict[str, Any] = {
        "name": "awkward",
        "model": {"factory": f"{name}:make"},
        "inputs": {"x": {"shape": ["N", 4], "N": {"min": 1, "opt": 2, "max": 4}}},
        "outputs": {n: {} for n in outputs},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npy", "limits": {"cosine_min": 0.99}},
    }
    (folder / "job.yaml").write_text(json.dumps(text | changes))
    return folder / "job.yaml"


@pytest.mark.parametrize("at", range(len(MODELS)), ids=lambda k: list(MODELS)[k])
def test_a_model_is_taken_or_its_message_says_what_helps(tmp_path: Path, at: int) -> None:
    body, (outputs, wanted) = list(MODELS.items())[at]
    problems = [str(e) for e in deep_problems(load_job(job(tmp_path, body, outputs, f"awkward_{at}")))]
    if wanted is None:
        assert problems == []
        return
    assert problems
    text = "\n".join(problems)
    for part in wanted:
        assert part in text
    assert "Traceback" not in text
    assert "http" not in text
    assert all(len(p.splitlines()) <= 10 for p in problems)


def test_the_command_says_each_problem_and_exits_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job(tmp_path, "return Out(y)", ONE, "awkward_command")
    assert main(["validate", "--deep", str(file)]) == 2
    assert "outputs: must be the tensors that the model returns (got y, and it returns Out(" in capsys.readouterr().err
    assert main(["validate", str(file)]) == 0
    assert main(["validate", "--deep", "--job-only", str(file)]) == 2
