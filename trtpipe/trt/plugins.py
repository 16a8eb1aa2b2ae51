"""Plugin libraries of a job or a bundle, made known to TensorRT.

A library is loaded from its bytes through a file in memory (memfd_create(2)), so what is executed is what was digested
and nothing that took its place on disk since. TensorRT has one registry for the process, and refuses a second plugin of
one name: a library stays, and one with the same bytes is not loaded again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Mapping

from trtpipe.errors import InputError
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.monitor import Watch

#: What `IPluginRegistry.load_library` looks for; a library without either registers its plugins as it is loaded
#: (REGISTER_TENSORRT_PLUGIN).
ENTRY_POINTS = ("getCreators", "getPluginCreators")

#: Libraries in TensorRT's registry, which is the process's too: (module, SHA-256), with what keeps each loaded.
_LOADED: dict[tuple[str, str], object] = {}
_ONE_AT_A_TIME = threading.Lock()


def load(tensorrt: Flavour, libraries: Mapping[str, bytes], watch: Watch) -> None:
    """Put the plugins of each library into TensorRT's registry. Their code runs: whose it is must be known before.

    Args:
        tensorrt: an imported TensorRT.
        libraries: content by file name.
        watch: of its logger.

    Raises:
        InputError: one cannot be loaded here, or TensorRT takes no plugins from it.
    """
    with _ONE_AT_A_TIME:
        for name, content in libraries.items():
            key = (tensorrt.name, hashlib.sha256(content).hexdigest())
            if key not in _LOADED:
                _LOADED[key] = _load(tensorrt, name, content, watch)


def _load(tensorrt: Flavour, name: str, content: bytes, watch: Watch) -> object:
    # Left open once something is loaded from it: dlopen(3) takes another library of the same path for this one.
    descriptor = os.memfd_create(name)
    path = f"/proc/self/fd/{descriptor}"
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        library = ctypes.CDLL(path)
    except OSError as error:
        os.close(descriptor)
        raise InputError(
            f"build.plugins: {name} cannot be loaded here ({str(error).replace(path, name)}). Build it for this "
            f"machine and {tensorrt.title}."
        ) from None
    if not any(hasattr(library, entry) for entry in ENTRY_POINTS):
        return library
    since = watch.mark()
    handle = tensorrt.module.get_plugin_registry().load_library(path)
    if handle is None:
        raise InputError(
            f"build.plugins: {tensorrt.title} takes no plugins from {name} ({watch.reason(since)}). Build it for "
            "this release, and see that no other library has plugins of the same names."
        )
    return handle
