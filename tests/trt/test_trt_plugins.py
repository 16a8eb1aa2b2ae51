"""Plugin libraries: loaded from their bytes, once in a process, or refused."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtpipe.errors import InputError
from trtpipe.progress import Silent
from trtpipe.trt import flavour, plugins
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.monitor import Watch

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="libraries are compiled by cc")

#: A library without plugins that counts how often it was loaded, in a variable of this process.
LOADED = """
#include <stdlib.h>
static __attribute__((constructor)) void loaded(void) {
  char const* before = getenv("PLUGINS_LOADED");
  char now[2] = {before ? before[0] + 1 : '1', 0};
  setenv("PLUGINS_LOADED", now, 1);
}
"""
CREATORS = """
void* getCreators(int* count) { *count = 0; return &getCreators; }
void setLoggerFinder(void* finder) {}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bytes]:
    monkeypatch.setattr(plugins, "_LOADED", {})

    def made(code: str) -> bytes:
        source, out = tmp_path / "plugin.c", tmp_path / "plugin.so"
        source.write_text(f'{code}\nchar const marker[] = "{tmp_path}";')  # other bytes than any other test's
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(out), str(source)], check=True)
        return out.read_bytes()

    return made


class Registry:
    """Stands for IPluginRegistry: what it was given, and whether it takes it."""

    def __init__(self, takes: bool = True) -> None:
        self.takes, self.given = takes, list[str]()

    def load_library(self, plugin_path: str) -> object:
        if not self.takes:
            WATCH.message("error", "a creator of twice exists already")
        self.given.append(plugin_path)
        return object() if self.takes else None


def stood_for(registry: Registry) -> Flavour:
    module: Any = SimpleNamespace(get_plugin_registry=lambda: registry)
    return Flavour("tensorrt", module, "10.3.0", frozenset({"plugins"}))


WATCH = Watch(Silent(), "error")


def times_loaded() -> str:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return (getenv(b"PLUGINS_LOADED") or b"0").decode()  # type: ignore[no-any-return]


def test_a_library_with_creators_goes_into_the_registry_once(library: Callable[[str], bytes]) -> None:
    registry, content = Registry(), library(CREATORS)
    for _ in range(2):
        plugins.load(stood_for(registry), {"libtwice.so": content}, WATCH)
    assert len(registry.given) == 1


def test_one_that_registers_its_plugins_itself_is_only_loaded(library: Callable[[str], bytes]) -> None:
    registry, content, before = Registry(), library(LOADED), times_loaded()
    for name in ("liba.so", "libb.so"):
        plugins.load(stood_for(registry), {name: content}, WATCH)
    assert registry.given == []
    assert int(times_loaded()) == int(before) + 1


def test_what_the_registry_does_not_take_is_named(library: Callable[[str], bytes]) -> None:
    with pytest.raises(InputError) as caught:
        plugins.load(stood_for(Registry(takes=False)), {"libtwice.so": library(CREATORS)}, WATCH)
    assert str(caught.value) == (
        "build.plugins: TensorRT 10.3.0 takes no plugins from libtwice.so (a creator of twice exists already). Build "
        "it for this release, and see that no other library has plugins of the same names."
    )


def test_what_is_no_library_is_named() -> None:
    with pytest.raises(InputError) as caught:
        plugins.load(stood_for(Registry()), {"libtwice.so": b"no library"}, WATCH)
    assert str(caught.value) == (
        "build.plugins: libtwice.so cannot be loaded here (libtwice.so: file too short). Build it for this machine and "
        "TensorRT 10.3.0."
    )


def test_a_real_registry_says_why_not(library: Callable[[str], bytes]) -> None:
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(InputError, match=r"^build\.plugins: TensorRT-RTX [0-9.]+ takes no plugins from libnone\.so \("):
        plugins.load(flavour.load("tensorrt_rtx"), {"libnone.so": library(CREATORS)}, WATCH)
