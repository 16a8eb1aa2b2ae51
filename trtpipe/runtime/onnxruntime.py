"""ONNX Runtime on the CPU: how a graph is executed where no engine can be. Needs onnxruntime and NumPy, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.errors import BuildError, InputError, MissingError

Array = np.ndarray[Any, Any]

#: ONNX Runtime 1.31 folds a Pad with zeros into a MaxPool, which pads with -inf: wrong for negative values (in BiT).
WRONG_OPTIMIZERS = ("Pad_Fusion",)


class OrtRunner:
    """Runs one ONNX file: named arrays in, named arrays out; a context manager.

    Args:
        model: the file's bytes or its path.
        as_written: execute each node as it stands, without any graph optimization. A check needs this: it is about
            the file and not about what another compiler makes of it, and Q/DQ pairs are then computed in float as
            TensorRT defines them; results in FP16 and BF16 are rounded, which ONNX Runtime by itself does not do on a
            CPU (`halves.rounded`; that needs onnx, and where it is missing `name` says so). False is for speed; the
            optimization known to be wrong stays off. A graph whose optimization fails (ONNX Runtime 1.31 makes a
            QLinearConcat of FP16 that it then refuses) runs without any, and `name` says so.

    Raises:
        MissingError: onnxruntime is not installed.
        BuildError: ONNX Runtime refuses the file.
    """

    def __init__(self, model: bytes | Path | str, *, as_written: bool = False, threads: int = 0) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise MissingError(
                "onnxruntime: must be installed to run a graph on the CPU (it is not). Run `pip install onnxruntime`."
            ) from None
        levels = onnxruntime.GraphOptimizationLevel

        def session(exact: bool) -> Any:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3 if exact else 4  # what the optimizer fails at is tried again, not shown
            options.intra_op_num_threads = threads
            # Its threads would spin on after a run, on the cores that torch, or the next model, needs.
            options.add_session_config_entry("session.force_spinning_stop", "1")
            if exact:
                options.graph_optimization_level = levels.ORT_DISABLE_ALL
            return onnxruntime.InferenceSession(
                model if isinstance(model, bytes) else str(model),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=None if exact else list(WRONG_OPTIMIZERS),
            )

        self.name = f"onnxruntime {onnxruntime.__version__}"
        if as_written:
            model = self._rounded(self._widened(model if isinstance(model, bytes) else Path(model).read_bytes()))
        try:
            self._session = session(as_written)
        except Exception as error:
            refused = BuildError(f"onnxruntime: must accept the graph (got {error}). Check its opset and dtypes.")
            if as_written:
                raise refused from error
            try:
                self._session = session(True)
            except Exception:  # noqa: BLE001  # the first refusal says what is wrong
                raise refused from error
            self.name += ", not optimized: its optimizer refuses the graph"
        self._inputs = tuple(i.name for i in self._session.get_inputs())
        self._outputs = tuple(o.name for o in self._session.get_outputs())

    def _widened(self, model: bytes) -> bytes:
        """The model with NVFP4, which ONNX Runtime cannot execute, dequantized to the same numbers; `name` says so."""
        if b"FP4DynamicQuantize" not in model and b"block_size" not in model:
            return model
        from trtpipe.runtime.four_bits import widened

        if (wide := widened(model)) is None:
            return model
        self.name += ", NVFP4 dequantized to the same numbers"
        return wide

    def _rounded(self, model: bytes) -> bytes:
        """The model with its half-precision results rounded; where that cannot be, `name` says why."""
        try:
            from trtpipe.runtime.half_rounding import Unrounded, rounded
        except ModuleNotFoundError as error:
            if error.name != "onnx":
                raise
            self.name += ", which does not round FP16 (install onnx)"
            return model
        try:
            return rounded(model) or model
        except Unrounded as error:
            self.name += f", which does not round FP16: {error}"
            return model

    def __enter__(self) -> OrtRunner:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        """Outputs by name, in their binding dtypes.

        Raises:
            InputError: the names are not the graph's, or ONNX Runtime refuses a shape or dtype.
        """
        if set(inputs) != set(self._inputs):
            raise InputError(f"inputs: must be {', '.join(self._inputs)} (got {', '.join(inputs)}). Name each one.")
        try:
            found = self._session.run(list(self._outputs), {n: np.ascontiguousarray(a) for n, a in inputs.items()})
        except Exception as error:
            raise InputError(f"inputs: must fit the graph (got {error}). Check shapes and dtypes.") from error
        return dict(zip(self._outputs, found, strict=True))
