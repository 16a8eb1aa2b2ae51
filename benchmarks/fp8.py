"""FP8 on a trained network: the graph against an emulation in PyTorch that shares no code with it, and against INT8.

    ZOO=data/zoo python benchmarks/fp8.py [--write docs/formats.md]      (benchmarks/fetch_zoo.py fetches the networks)

End to end, two FP8 implementations that sum in another order part ways: where a sum lies next to the middle between two
E4M3 numbers, its last bit decides which one it becomes, a difference of 6 %, and the layers behind multiply such flips.
How much of a distance that explains is measured by the emulation against itself, with an input that differs in its
last bit. What float32 allows to hold is each part between two quantizers: given the same quantized inputs, both must
give the same sums but for their rounding, and from the same sums exactly the same E4M3 numbers. End to end the two are
compared with float64 between the quantizers, which stay as they are in the file: its sums differ by 1e-16, which hardly
ever changes the float32 number that a quantizer gets.
"""

from __future__ import annotations

import argparse
import copy
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from fp8_emulation import Emulation, by_table, folded, scale_of, through
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from trtpipe.runtime.onnxruntime import OrtRunner

if TYPE_CHECKING:
    from trtpipe.pipeline.prepared import PreparedJob
    from trtpipe.values import Quantized

BEGIN, END = "<!-- begin: benchmarks/fp8.py -->", "<!-- end: benchmarks/fp8.py -->"


@dataclass
class Forced:
    """A quantizer that gives what a graph's quantizer gave, after its input was compared with the graph's.

    Attributes:
        graph: by float32 scale, the input and the output of a quantizer of the graph.
        amax: by key; each scale belongs to one key.
        distances: relative L2 between the two inputs, by key.
        differ: how many outputs, over all keys, are not the E4M3 number that PyTorch makes of the graph's input.
    """

    graph: Mapping[float, tuple[torch.Tensor, torch.Tensor]]
    amax: Mapping[str, float]
    distances: dict[str, float] = field(default_factory=dict)
    differ: int = 0

    def __call__(self, key: str, x: torch.Tensor) -> torch.Tensor:
        """The graph's value after its quantizer of this key."""
        scale = scale_of(self.amax[key])
        before, after = self.graph[scale]
        self.distances[key] = relative(x, before)
        self.differ += int((through(before, scale) != after).sum())
        return after


def quantizers(model: bytes, inputs: Mapping[str, Any]) -> tuple[dict[float, Any], dict[str, Any]]:
    """What ONNX Runtime computes of an FP32 graph with FP8 Q/DQ: the input and output of every activation's quantizer,
    by its scale, and the outputs.

    Raises:
        ValueError: two quantizers have one scale.
    """
    proto = onnx.load_from_string(model)
    scales = {i.name: onnx.numpy_helper.to_array(i) for i in proto.graph.initializer}
    scales |= {
        n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t) for n in proto.graph.node if n.op_type == "Constant"
    }
    readers = {n.input[0]: n for n in proto.graph.node if n.op_type == "DequantizeLinear"}
    found: dict[float, tuple[str, str]] = {}
    for node in proto.graph.node:
        if node.op_type == "QuantizeLinear":
            scale = float(scales[node.input[1]])
            if scale in found:
                raise ValueError(f"two quantizers have the scale {scale}")
            found[scale] = (node.input[0], readers[node.output[0]].output[0])
    have = [o.name for o in proto.graph.output]
    more = sorted({name for pair in found.values() for name in pair} - set(have))
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in more)
    with OrtRunner(proto.SerializeToString(), as_written=True) as runner:
        values = runner.run(inputs) | {n: a for n, a in inputs.items() if n in more}
    pairs = {s: tuple(torch.from_numpy(values[n].copy()) for n in pair) for s, pair in found.items()}
    return pairs, {name: values[name] for name in have}


class Gelu(OpRun):  # type: ignore[misc]
    """Gelu in float64, where onnx's own reference has its constants and erf in float32."""

    op_domain = ""

    def _run(self, x: np.ndarray[Any, Any], approximate: str = "none") -> tuple[np.ndarray[Any, Any]]:
        return (torch.nn.functional.gelu(torch.from_numpy(x), approximate=approximate).numpy(),)


def in_float64(model: bytes) -> onnx.ModelProto:
    """The FP32 graph in float64, its quantizers and what they store as they were, with a Cast on their float sides."""
    proto = onnx.load_from_string(model)
    graph, (single, double) = proto.graph, (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    quantizers = ("QuantizeLinear", "DequantizeLinear")
    scales = {n.input[1] for n in graph.node if n.op_type in quantizers}
    tensors = {i.name: i for i in graph.initializer}
    tensors |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    for name, tensor in tensors.items():
        if tensor.data_type == single and name not in scales:
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float64), name))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        between = f"{node.output[0]}/float32"
        if node.op_type == "QuantizeLinear":
            nodes.append(onnx.helper.make_node("Cast", [node.input[0]], [between], to=single))
            node.input[0] = between
        nodes.append(node)
        if node.op_type == "DequantizeLinear":
            nodes.append(onnx.helper.make_node("Cast", [between], [node.output[0]], to=double))
            node.output[0] = between
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == single:
                attribute.i = double
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == single:
            value.type.tensor_type.elem_type = double
    return proto


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 error of `a`, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def wide_of(quantized: Quantized) -> frozenset[tuple[str, str]]:
    """(module path, operation) of what a quantized graph computes in FP32."""
    return frozenset((x.module, x.op) for x in quantized.layers if x.precision == "fp32")


@dataclass(frozen=True)
class Agreement:
    """How far an FP8 graph is from its emulation, relative L2.

    Attributes:
        parts: the largest distance before a quantizer, and at the output, given the graph's own quantized values.
        tensors: how many quantizers that was measured at.
        differ: E4M3 numbers that differ, made of the same float32 numbers.
        program: the PyTorch program, end to end.
        graph: the ONNX file in ONNX Runtime, end to end.
        exact: the ONNX file by onnx's reference implementation, end to end, both with float64 between the quantizers.
        last_bit: the emulation from itself, with inputs that differ in their last bit.
        wide_last_bit: the same of the FP32 network.
        noise: the emulation from the FP32 network: what FP8 costs.
    """

    parts: float
    tensors: int
    differ: int
    program: float
    graph: float
    exact: float
    last_bit: float
    wide_last_bit: float
    noise: float


def agreement(
    network: torch.nn.Module, quantized: Quantized, model: bytes, amax: Mapping[str, float], images: torch.Tensor
) -> Agreement:
    """Measure it.

    Args:
        network: the eager network, without batch norms (see `folded`).
        quantized: the program in FP8 and FP32, of one input and one output.
        model: the ONNX file of it.
        amax: the table's maxima.
        images: the input.
    """
    (name,), (output,) = [s.name for s in quantized.inputs], [s.name for s in quantized.outputs]
    wide, nudged = wide_of(quantized), torch.nextafter(images, torch.full_like(images, torch.inf))
    pairs, outputs = quantizers(model, {name: images.numpy()})
    graph = torch.from_numpy(outputs[output])
    forced = Forced(pairs, amax)
    last = relative(Emulation(network, forced, wide).run(images), graph)
    emulated = Emulation(network, by_table(amax), wide).run(images)
    wider = ReferenceEvaluator(in_float64(model), new_ops=[Gelu]).run([output], {name: images.double().numpy()})
    exactly = Emulation(copy.deepcopy(network).double(), by_table(amax), wide).run(images.double())
    with torch.inference_mode():
        program = quantized.program.module()(images)[0]
        reference, moved = network(images), network(nudged)
    return Agreement(
        parts=max(last, *forced.distances.values()),
        tensors=len(forced.distances),
        differ=forced.differ,
        program=relative(program, emulated),
        graph=relative(graph, emulated),
        exact=relative(torch.from_numpy(wider[0]), exactly),
        last_bit=relative(Emulation(network, by_table(amax), wide).run(nudged), emulated),
        wide_last_bit=relative(moved, reference),
        noise=relative(emulated, reference),
    )


def job_of(name: str, folder: Path, photos: int) -> PreparedJob:
    """The zoo's network `name` in the pipeline, with calibration and held-out photographs."""
    import zoo

    from trtpipe.job.job import Job
    from trtpipe.pipeline.prepared import PreparedJob, Stages
    from trtpipe.progress import Silent

    dealt, size = zoo.split(), zoo.NETWORKS[name].size
    np.save(folder / "calibration.npy", zoo.batch(name, dealt.calibration[:photos]))
    np.save(folder / "check.npy", zoo.batch(name, dealt.held_out[:8]))
    job = Job.model_validate(
        {
            "name": name,
            "model": {"factory": "zoo:create", "args": {"name": name}},
            "inputs": {"image": {"shape": ("N", 3, size, size), "N": {"min": 1, "opt": 8, "max": 16}}},
            "outputs": {"out": {}},
            "precision": {"int8_mode": True},
            "calibration": {"arrays": str(folder / "calibration.npy"), "batch_size": 8},
            "check": {"arrays": str(folder / "check.npy"), "batch_size": 8},
        }
    )
    return PreparedJob(job, Stages(Silent()))


def by_photograph(module: Any, prepared: PreparedJob, images: np.ndarray[Any, Any]) -> torch.Tensor:
    """The SQNR, in dB, of a program of the network on each image."""
    parts = []
    with torch.inference_mode():
        for first in range(0, len(images), 8):
            batch = torch.from_numpy(images[first : first + 8])
            reference, got = (m(batch)[0].double().flatten(1) for m in (prepared.captured.graph, module))
            parts.append(10 * torch.log10(reference.square().sum(1) / (got - reference).square().sum(1)))
    return torch.cat(parts)


def measured(name: str, photos: int) -> str:
    """The page's section, in Markdown."""
    import zoo

    from calib.table import CalibrationTable
    from trtpipe.pipeline import stages as line
    from trtpipe.pipeline.prepared import Stages
    from trtpipe.progress import Silent
    from trtpipe.quantization.formats import maxima
    from trtpipe.quantization.narrow import Statistics
    from trtpipe.quantization.policy import Modes
    from trtpipe.quantization.precision import Keep
    from trtpipe.quantization.quantize import Narrow, quantize
    from trtpipe.routes.onnx import to_onnx
    from trtpipe.values import NumberFormatName

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepared = job_of(name, folder, photos)
        tables = {}
        for corrections in (False, True):
            assert prepared.job.calibration is not None
            calibration = prepared.job.calibration.model_copy(update={"corrections": corrections})
            job = prepared.job.model_copy(update={"calibration": calibration})
            made = line.calibrate(job, prepared, Stages(Silent()))
            assert made is not None
            made.save(folder / "calibration.json")
            tables[corrections] = CalibrationTable.load(folder / "calibration.json")
        images = np.load(folder / "check.npy")
        more = zoo.batch(name, zoo.split().held_out[:64])

    def program(table: Any, modes: Modes, moments: Mapping[str, torch.Tensor] | None = None) -> Any:
        return quantize(
            prepared.corrected(table).captured,
            int8="int8" in modes.on,
            half=None,
            keep=Keep(),
            amax=table.amax,
            ranges={},
            narrow=Narrow(modes, Statistics(maxima(table), moments or {})) if modes.narrow else None,
        )

    with torch.inference_mode():
        reference = prepared.captured.graph(torch.from_numpy(images))[0].double()

    def decibels(got: torch.Tensor) -> float:
        return float(10 * torch.log10(reference.square().sum() / (got.double() - reference).square().sum()))

    def executed(model: bytes) -> torch.Tensor:
        with OrtRunner(model, as_written=True) as runner:
            (got,) = runner.run({"image": images}).values()
        return torch.from_numpy(got)

    rows = ["| | INT8 | FP8 | FP8 and INT8 |", "|---|---|---|---|"]
    modes: tuple[tuple[NumberFormatName, ...], ...] = (("int8",), ("fp8",), ("int8", "fp8"))
    for corrections, table in tables.items():
        figures = [decibels(executed(to_onnx(program(table, Modes(frozenset(m)))).data)) for m in modes]
        rows.append(
            f"| {'with' if corrections else 'without'} corrections | {' | '.join(f'{f:.1f}' for f in figures)} |"
        )
        print(rows[-1], flush=True)
    narrow = [
        f"The same of weights alone, the mean over {len(more)} held-out photographs:",
        "",
        "| | rounded to the nearest | fitted to their inputs | gain, with its standard error |",
        "|---|---|---|---|",
    ]
    fours: tuple[tuple[str, NumberFormatName], ...] = (("INT4", "int4"), ("NVFP4", "nvfp4"))
    for title, weights in fours:
        nearest, fitted = (
            by_photograph(program(tables[False], Modes(weights=weights), known).program.module(), prepared, more)
            for known in ({}, prepared.moments)
        )
        gains = fitted - nearest
        error = gains.std() / len(more) ** 0.5
        narrow.append(f"| {title} | {nearest.mean():.1f} | {fitted.mean():.1f} | {gains.mean():.1f} ± {error:.1f} |")
        print(narrow[-1], flush=True)
    fp8 = program(tables[False], Modes(frozenset({"fp8"})))
    with torch.inference_mode():
        found = agreement(
            folded(zoo.create(name)), fp8, to_onnx(fp8).data, maxima(tables[False]), torch.from_numpy(images[:2])
        )
    print(found)
    return "\n".join(
        [
            f"`{name}`, {photos} photographs for calibration, SQNR in dB of {len(images)} held-out ones, every "
            "operation that a format can hold in it, the others in FP32:",
            "",
            *rows,
            "",
            *narrow,
            "",
            "| relative L2 distance | |",
            "|---|---|",
            f"| FP8 emulated in PyTorch, from FP32: what FP8 costs | {found.noise:.1e} |",
            f"| the PyTorch program from the emulation | {found.program:.1e} |",
            f"| the ONNX file, executed by ONNX Runtime, from the emulation | {found.graph:.1e} |",
            "| the ONNX file from the emulation, both with float64 between the quantizers, by onnx's reference "
            f"implementation | {found.exact:.1e} |",
            f"| the emulation from itself, the last bit of its input changed | {found.last_bit:.1e} |",
            f"| FP32 from itself, the last bit of its input changed | {found.wide_last_bit:.1e} |",
            f"| the ONNX file from the emulation, part by part, at {found.tensors} quantizers and the output | "
            f"{found.parts:.1e} |",
            f"| E4M3 numbers that differ, made of the same float32 numbers | {found.differ} |",
        ]
    )


def main() -> None:
    """Print the section, and put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="vit_s14_saliency")
    parser.add_argument("--photos", type=int, default=32, help="photographs for calibration")
    parser.add_argument("--write", type=Path, help="page whose marked part is replaced")
    arguments = parser.parse_args()
    text = measured(arguments.network, arguments.photos)
    print(text)
    if arguments.write:
        page = arguments.write.read_text()
        arguments.write.write_text(
            re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.DOTALL)
        )


if __name__ == "__main__":
    main()
