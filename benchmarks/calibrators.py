"""The calibrators that `calibration.py` measures, each as a function of the images that it runs on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtpipe.values import Captured


def calib_runner(captured: Captured, batch: int, algorithm: str, device: str) -> Callable[[Any], Any]:
    """A function that calibrates on a source as a job does, on a graph that was prepared before."""
    from calib.calibrate import calibrate
    from calib.observers import HistogramObserver
    from trtpipe.model.computing import placed
    from trtpipe.model.recorded import replayed
    from trtpipe.quantization.quantize import prepare

    prepared = prepare(captured)

    def run(source: Any) -> Any:
        for observer in prepared.observers.values():
            observer.histogram = HistogramObserver()
        found = {key: o.histogram for key, o in prepared.observers.items() if o.histogram is not None}
        with placed(prepared.graph, device), replayed(lambda inputs: prepared.graph(*inputs), device) as run_batch:
            return calibrate(
                run_batch,
                found,
                source,
                batch_size=batch,
                algorithm=algorithm,
                device=device,
            )

    return run


def onnxruntime_runner(captured: Captured, example: Any, folder: Path, method: str) -> Callable[[list[Any]], None]:
    """A function that calibrates the same graph as ONNX with ONNX Runtime's calibrator, fed batch by batch."""
    import torch
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator

    path = folder / "model.onnx"
    torch.onnx.export(
        captured.graph,
        (example,),
        str(path),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},),
        input_names=["x"],
        output_names=["y"],
        external_data=False,
        verbose=False,
    )
    kinds = {"minmax": CalibrationMethod.MinMax, "entropy": CalibrationMethod.Entropy}

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, images: list[Any]) -> None:
            self.batches: Iterator[Any] = iter(images)

        def get_next(self) -> Any:
            return next(({"x": b} for b in self.batches), None)

    def made() -> Any:
        augmented = str(folder / "augmented.onnx")
        return create_calibrator(str(path), ["Conv", "Gemm", "MatMul"], augmented, calibrate_method=kinds[method])

    ready = [made()]  # the first run's, made before the clock starts

    def run(images: list[Any]) -> None:
        calibrator = ready.pop() if ready else made()
        calibrator.collect_data(Reader(images))
        calibrator.compute_data()

    return run


def modelopt_runner(network: Any) -> Callable[[list[Any]], None]:
    """A function that runs ModelOpt's entropy calibrators on the inputs of convolutions and linear layers."""
    import modelopt.torch.quantization as mtq
    import torch

    config = {  # in the form of ModelOpt 0.47
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}, "enable": True},
            {
                "quantizer_name": "*input_quantizer",
                "cfg": {"num_bits": 8, "axis": None, "calibrator": "histogram"},
                "enable": True,
            },
        ],
        "algorithm": None,
    }

    def run(batches: list[Any]) -> None:
        model = mtq.quantize(copy.deepcopy(network), config)
        for name, module in model.named_modules():
            if name.endswith("weight_quantizer"):  # would quantize its weights anew in every pass
                module.disable()
        quantizers = [m for n, m in model.named_modules() if n.endswith("input_quantizer") and m.is_enabled]
        for quantizer in quantizers:
            quantizer.disable_quant()
            quantizer.enable_calib()
        with torch.inference_mode():
            for x in batches:
                model(x)
        for quantizer in quantizers:
            quantizer.load_calib_amax("entropy")

    return run


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
