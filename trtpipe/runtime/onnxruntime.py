"""ONNX Runtime on the CPU: how a graph is executed where no engine can be. Needs onnxruntime and NumPy, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from calib.files import read_regular
from calib.types import Array
from trtpipe.batching import require_names
from trtpipe.errors import BuildError, InputError, MissingError
from trtpipe.import_errors import broken
from trtpipe.machine import how_ended
from trtpipe.packages import pip_install, present

#: How much of its graph optimization ONNX Runtime does, most first; "all" is its default.
Optimization = Literal["all", "extended", "basic", "none"]
_LEVELS: Mapping[Optimization, str] = {
    "all": "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "none": "ORT_DISABLE_ALL",
}
#: Opens the graph on stdin as `OrtRunner` does.
_TRY = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads = 1
options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, sys.argv[2])
onnxruntime.InferenceSession(sys.stdin.buffer.read(), options, providers=["CPUExecutionProvider"])
"""


class OrtRunner:
    """Runs one ONNX file: named arrays in, named arrays out; a context manager.

    Args:
        model: the file's bytes or its path.
        as_written: execute each node as it stands, without any graph optimization. The check of a TensorRT engine needs
            this: it is about the file and not about what another compiler makes of it, and Q/DQ pairs are then
            computed in float as TensorRT defines them; results in FP16 and BF16 are rounded, which ONNX Runtime by
            itself does not do on a CPU (`half_rounding.rounded`; that needs onnx, and where it is missing `name` says
            so). False is a session with ONNX Runtime's default optimizations, as anybody opens one: what its optimizer
            makes of a quantized graph can be something else (`executor.open_graph` finds out).
        optimization: less than the default.
        tried: a graph of the same nodes was optimized before by this process.

    Raises:
        MissingError: onnxruntime is not installed, or cannot be imported; or onnx is not, and ONNX Runtime refuses the
            file, which has NVFP4 or BF16 then.
        BuildError: ONNX Runtime refuses the file, or its optimizer ends the process that tries it.
    """

    def __init__(
        self,
        model: bytes | Path | str,
        *,
        as_written: bool = False,
        optimization: Optimization = "all",
        tried: bool = False,
    ) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            if error.name != "onnxruntime":
                raise MissingError(broken("onnxruntime", error)) from error
            raise MissingError(
                f"onnxruntime: not installed, and a graph on the CPU is run with it. Run: {pip_install('onnxruntime')}"
            ) from None
        except (ImportError, OSError, RuntimeError) as error:
            raise MissingError(broken("onnxruntime", error)) from error
        if not hasattr(onnxruntime, "InferenceSession"):  # what an interrupted `pip uninstall` leaves can be imported
            raise MissingError(broken("onnxruntime", "it has no InferenceSession"))
        self.name = f"onnxruntime {onnxruntime.__version__}"
        self.notes: tuple[str, ...] = ()
        self._without_onnx = False
        if as_written:
            given = model if isinstance(model, bytes) else read_regular(Path(model))
            optimization, model = "none", self._rounded(self._widened(given))
            self.notes = (f"executed by {self.name}",) if "," in self.name else ()
        if optimization != "none" and not tried:
            _require_optimizable(model if isinstance(model, bytes) else read_regular(Path(model)), optimization)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it refuses is raised below
        # Its threads would spin on after a run, on the cores that torch, or the next model, needs.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # In the file's order: by itself it dequantizes every weight before it begins, and holds them all.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        # A batch's memory, planned in one block beside what the first one took: half as much again for a ViT-B.
        options.enable_mem_pattern = not as_written
        self._how = onnxruntime.RunOptions()
        if as_written:  # what a run took is given back: the largest batch of a check comes last, beside the others'
            self._how.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[optimization])
        try:
            session = onnxruntime.InferenceSession(
                model if isinstance(model, bytes) else str(model), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            if self._without_onnx:
                raise MissingError(
                    "onnx: not installed, and a graph in NVFP4 or BF16 needs it on the CPU (ONNX Runtime by itself: "
                    f"{error}). Run: {pip_install('onnx')}"
                ) from error
            raise BuildError(
                f"graph: ONNX Runtime {onnxruntime.__version__} does not accept it ({error}). Check its opset and "
                "dtypes, or take another release."
            ) from error
        self._session: onnxruntime.InferenceSession | None = session
        #: By name, the shapes of the file; a str, or None, is a size that is not fixed.
        self.inputs = {i.name: tuple(i.shape) for i in session.get_inputs()}
        self.outputs = {o.name: tuple(o.shape) for o in session.get_outputs()}

    def _widened(self, model: bytes) -> bytes:
        """The model with NVFP4, which ONNX Runtime cannot execute, dequantized to the same numbers; `name` says so."""
        if b"FP4DynamicQuantize" not in model and b"block_size" not in model:
            return model
        if not present("onnx"):
            self._without_onnx = True
            return model
        from trtpipe.runtime.four_bits import widened

        if (wide := widened(model)) is None:
            return model
        self.name += ", NVFP4 dequantized to the same numbers"
        return wide

    def _rounded(self, model: bytes) -> bytes:
        """The model with its half-precision results rounded; where that cannot be, `name` says why."""
        if not present("onnx"):
            self._without_onnx = True
            self.name += ", which does not round FP16, if the graph has any (install onnx)"
            return model
        from trtpipe.runtime.half_rounding import Unrounded, rounded

        try:
            return rounded(model) or model
        except Unrounded as error:
            self.name += f", which does not round FP16: {error}"
            return model

    def __enter__(self) -> OrtRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the session's memory back; the runner cannot run after it."""
        self._session = None

    def run(self, inputs: Mapping[str, Array], /, names: Sequence[str] = ()) -> dict[str, Array]:
        """Outputs by name, in their binding dtypes: those of `names`, or all.

        Raises:
            InputError: the names are not the graph's, or ONNX Runtime refuses a shape, a dtype or an index.
        """
        require_names(inputs, tuple(self.inputs))
        session = self._session
        if session is None:
            raise InputError("graph: must be open to be run (its session was closed). Open it again.")
        try:
            given = {n: np.ascontiguousarray(a) for n, a in inputs.items()}
            outputs = session.run(names or list(self.outputs), given, self._how)
        except Exception as error:
            raise InputError(f"inputs: must fit the graph (got {error}). Check shapes, dtypes and indices.") from error
        return dict(zip(names or self.outputs, outputs, strict=True))


def _require_optimizable(model: bytes, optimization: Optimization) -> None:
    """Let a process of its own open the graph first: what ONNX Runtime's optimizer makes of one may be a crash (1.31.1
    crashes on every LSTM and GRU in FP16), and no process can say so of itself.

    Raises:
        BuildError: the process was ended by a signal.
    """
    command = (sys.executable, "-c", _TRY, json.dumps(sys.path), _LEVELS[optimization])
    code = subprocess.run(command, input=model, capture_output=True, check=False).returncode
    if code < 0:
        raise BuildError(
            f"graph: ONNX Runtime crashes as it optimizes it ({how_ended(code)}). Build it in another "
            "precision, or install another release of onnxruntime."
        )
