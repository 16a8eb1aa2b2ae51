"""What benchmarks/accuracy.py has measured: the file that rows are kept in, a row as a line, and the page in docs."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import zoo

#: Networks that were looked at while the defaults were chosen; the others confirm them.
CHOSEN_ON = ("mobilenet_v2", "efficientnet_lite0", "resnet50", "vit_s14_saliency")
SETS = {"held_out": "photographs held out", "labelled": "labelled photographs", "cifar10": "CIFAR-10"}
PAGE = """\
# INT8 on trained networks

Written by `make bench-accuracy` ({machine}), which needs the networks and photographs that `benchmarks/fetch_zoo.py`
fetches. Every tool starts from one FP32 graph and calibrates on the same 128 photographs, none of which is in an
evaluation set; all graphs are executed by ONNX Runtime as they are written, without optimization, and compared with
FP32. No GPU took part. Networks and rows that are missing have not been measured yet; rows may be
of several runs, and of several states of trtpipe within one release.

SQNR is in dB at the output, over {sets}. `as FP32` is the share of images that get the class that they get in FP32,
over all sets, with the exact 95 % interval. CIFAR-10's images are enlarged and answered by an ImageNet network, whose
classes are mapped to the ten. `s` are the seconds of calibrating and, where that is part of it, correcting, on a
machine that did other work too; those of other tools are of their whole quantization. `engine` is the size of
TensorRT-RTX's engine in MB, where one was built.

Rows without `FP16` have INT8 in every operation that can be quantized, beside FP32. trtpipe's default is algorithm
`auto` with every correction; the other rows of trtpipe are without corrections. With FP16 allowed, what gains nothing
from INT8 stays in FP16 ([choosing](choosing.md#the-precision)). The defaults were chosen on {chosen}, in part by rows
of this page; the other networks were not used for that. What is chosen now is chosen by calibration photographs alone:
corrected by 96 of them, judged on the other 32 and on blurred and fainter copies of these. A row or a network that is
missing was not measured: `make bench-accuracy` adds it.
ONNX Runtime gets the images in pieces of 8, since it holds all activations of a piece in memory.
"""


class Results:
    """Rows by network and name, in a JSON file that is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"machine": f"{os.cpu_count()} CPU cores, {platform.machine()}", "rows": {}}
        if path.exists():
            self.content = json.loads(path.read_text())

    @property
    def rows(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Rows by network and name."""
        rows: dict[str, dict[str, dict[str, Any]]] = self.content["rows"]
        return rows

    def has(self, network: str, name: str) -> bool:
        """Whether there is such a row."""
        return name in self.rows.get(network, {})

    def add(self, network: str, name: str, row: dict[str, Any]) -> None:
        """Keep a row, on disk too."""
        self.rows.setdefault(network, {})[name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    def line(self, network: str, name: str) -> str:
        """A row for a terminal."""
        row = self.rows[network][name]
        return f"{network:20} {name:36} " + "  ".join(c for c in cells(network, row) if c)


def cells(network: str, row: dict[str, Any]) -> list[str]:
    """A row's figures: SQNR by set, agreement or mean absolute error, accuracy, seconds, engine."""
    found = [_number(row["sqnr_db"][key], ".1f") for key in SETS if key in row["sqnr_db"]]
    if zoo.NETWORKS[network].dense:
        found += [f"{row['mae'][key]:.4f}" for key in ("held_out", "labelled")]
    else:
        from trtpipe.evaluation.intervals import binomial_interval

        equal, samples = row["agreement"]
        low, high = binomial_interval(equal, samples)
        found.append(f"{equal / samples:.3f} ({low:.3f}-{high:.3f})")
        found += [f"{right} of {count}" for right, count in (row["correct"][k] for k in ("labelled", "cifar10"))]
    found.append(_number(row.get("seconds"), ".0f"))
    found.append(_number(row["engine_bytes"] / 1e6 if "engine_bytes" in row else None, ".2f"))
    return found


def _number(value: float | None, shown: str) -> str:
    return "" if value is None else format(value, shown)


def document(results: Results) -> str:
    """The page."""
    text = PAGE.format(machine=results.content["machine"], sets=", ".join(SETS.values()), chosen=", ".join(CHOSEN_ON))
    for network, rows in results.rows.items():
        dense = zoo.NETWORKS[network].dense
        titles = [SETS[k] for k in SETS if not dense or k != "cifar10"]
        titles += ["MAE, held out", "MAE, labelled"] if dense else ["as FP32", "labelled right", "CIFAR-10 right"]
        titles += ["s", "engine"]
        text += f"\n## {network}{'' if network in CHOSEN_ON else ' (confirms)'}\n\n| | " + " | ".join(titles) + " |\n"
        text += "| --- |" + " ---: |" * len(titles) + "\n"
        for name, row in rows.items():
            text += f"| {name} | " + " | ".join(cells(network, row)) + " |\n"
    return text
