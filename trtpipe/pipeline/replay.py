"""An engine built again as a bundle's was: with its timing cache, and held against it byte by byte."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.bundle.format import Bundle
from trtpipe.bundle.kit import OF_KIT
from trtpipe.bundle.manifest import GRAPH, TIMING_CACHE, UNRECORDED
from trtpipe.errors import InputError
from trtpipe.runtime.compatibility import admit
from trtpipe.trt.timing_cache import GIVEN, NOTE

if TYPE_CHECKING:
    from trtpipe.job.job import Job


@dataclass(frozen=True)
class Replayed:
    """Whether an engine came out the same, byte for byte, and where not, what was different."""

    same: bool
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line."""
        return "the engine is the same, byte for byte" if self.same else f"the engine differs: {'; '.join(self.why)}"


def bundle_to_replay(path: Path, key: Path | None) -> Bundle:
    """The bundle, verified: TensorRT is going to read its timing cache.

    Args:
        path: its directory.
        key: file of trusted public keys, or None.

    Raises:
        InputError: it is a kit, damaged, or not signed as it has to be.
    """
    bundle, _ = admit(path, key)
    if bundle.manifest.engine is None:
        raise InputError(f"{path}: is a kit, which has no engine yet. Give a finished bundle.")
    return bundle


@contextmanager
def timing_cache_of(bundle: Bundle) -> Iterator[str | None]:
    """A folder for `build.timing_cache` that holds the bundle's own, for the block; None where it has none."""
    if TIMING_CACHE not in bundle.manifest.files:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="trtpipe-replay-") as folder:
        Path(folder, GIVEN).write_bytes(bundle.read(TIMING_CACHE))
        yield folder


def with_timing_cache(job: Job, folder: str) -> Job:
    """The job with this folder of timing caches in the place of its own, where its target has them."""
    if job.build.target != "tensorrt":
        return job
    return job.model_copy(update={"build": job.build.model_copy(update={"timing_cache": folder})})


def compared(before: Bundle, now: Bundle) -> Replayed:
    """The engine of one bundle against that of another."""
    then, here = before.manifest, now.manifest
    assert then.engine is not None
    assert here.engine is not None
    files = [m.files[m.engine_file].sha256 for m in (then, here)]
    if files[0] == files[1]:
        return Replayed(True)
    why = [
        f"{what} {old} then, {new} now"
        for what, old, new in (
            ("target", then.engine.target, here.engine.target),
            ("version", then.engine.version, here.engine.version),
            ("compute capability", *(_listed(m.engine.compute_capabilities) for m in (then, here) if m.engine)),
        )
        if old != new
    ]
    options = [m.build.model_dump(exclude=set(UNRECORDED)) | dict(m.engine.options) for m in (then, here) if m.engine]
    changed = sorted(name for name in {*options[0], *options[1]} if options[0].get(name) != options[1].get(name))
    why += [f"other options ({', '.join(changed)})"] if changed else []
    for what in ("inputs", "outputs"):
        old, new = ({spec.name: spec for spec in getattr(m, what)} for m in (then, here))
        other = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        why += [f"other {what}, or their sizes ({', '.join(other)})"] if other else []
    asked, asks = then.precision.model_dump(), here.precision.model_dump()
    recast = sorted(key for key in asks if asked[key] != asks[key])
    why += [f"another precision ({', '.join(recast)})"] if recast else []
    graphs = [m.files[GRAPH].sha256 if GRAPH in m.files else "" for m in (then, here)]
    if graphs[0] != graphs[1] and not recast:
        other = _other_releases(then.environment, here.environment)
        wrote = f", or what wrote it: {'; '.join(other)}" if other else ""
        why.append(f"{GRAPH} differs: the model, its weights, the calibration or trtpipe's own code changed{wrote}")
    if then.engine.target == "tensorrt" and TIMING_CACHE not in then.files:
        why.append(
            f"the bundle holds no {TIMING_CACHE}: it was built without build.timing_cache, so tactics were timed anew"
        )
    why += [note for note in here.notes if note.startswith(NOTE)]
    return Replayed(False, tuple(why) or (_around(then.environment, here.environment),))


#: Packages of another release that are named.
_MOST_NAMED = 4


def _around(then: Mapping[str, str], here: Mapping[str, str]) -> str:
    """What is left to say where nothing that decides is other: the releases around it that are."""
    return "; ".join(["of the same graph and options by the same TensorRT", *_other_releases(then, here)])


def _other_releases(then: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    own = [n for n in here if not n.endswith(OF_KIT)]  # of a kit, what made its graph
    other = sorted((n for n in own if then.get(n) != here[n]), key="torch".__ne__)  # it first, as it writes the graph
    return [f"{n} {then.get(n, 'none')} then, {here[n]} now" for n in other[:_MOST_NAMED]]


def _listed(capabilities: tuple[str, ...]) -> str:
    return ", ".join(capabilities) or "portable"
