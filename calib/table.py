"""The calibration table: one amax for each quantized tensor, how it came to be, and what it may be used for.

On disk it is `calibration.json` (canonical JSON, one text for one table) and, beside it,
`calibration.histograms.safetensors` with what merging tables and other algorithms need. The JSON alone is enough to
build an engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load

from calib.algorithms import INT8_MAX, PERCENTILE, Algorithm
from calib.audit import DEAD_AMAX, LEAST_AMAX, Audit, Halves, choose, nine_digits, warnings_of, with_thresholds
from calib.corrections import Corrections, Step, StepName, corrections_path, load_corrections
from calib.errors import CalibError
from calib.files import read_regular, replacing
from calib.frozen import Frozen
from calib.histogram import Histogram
from calib.samples import combine_digests
from calib.strictjson import first_problem
from calib.table_files import canonical, histograms_path, pack, parse, unpack
from calib.types import JsonObject

_FORMAT = "calib-table"
#: A table with corrections is of version 2: a reader of version 1 would build its engine without them.
PLAIN, CORRECTED = 1, 2
NOTHING_TO_OBSERVE = "calibration: there is no tensor to observe. Is any layer left to quantize?"

#: A digest as hexadecimal digits.
SHA256 = r"^[0-9a-f]{64}$"
Hex = Annotated[str, Field(pattern=SHA256)]
Key = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*:[A-Za-z0-9_.\[\]-]+$", max_length=1024)]
Amax = Annotated[float, Field(ge=LEAST_AMAX, le=float(np.finfo(np.float32).max), allow_inf_nan=False)]


class _Corrections(Frozen, strict=True):
    """The part of a table of version 2."""

    steps: tuple[Step, ...]
    sha256: Hex | None
    none: Annotated[str, Field(max_length=1024)] = ""


class _TableFile(Frozen, strict=True):
    """The JSON file, field by field."""

    format: Literal["calib-table"]
    version: Literal[1, 2]
    algorithm: Literal[Algorithm, "given"]
    percentile: Annotated[float, Field(gt=0, le=100)]
    digests: dict[StepName, Annotated[str, Field(min_length=1, max_length=256)]]
    recipe: Annotated[str, Field(max_length=65536)]
    samples: dict[str, Hex]
    amax: Annotated[dict[Key, Amax], Field(min_length=1)]
    audit: Audit
    histograms_sha256: Hex | None
    corrections: _Corrections | None = None
    digest: Hex

    @model_validator(mode="after")
    def _version_matches_corrections(self) -> _TableFile:
        if (self.version == CORRECTED) != (self.corrections is not None):
            raise ValueError("a table of version 2, and only that, has corrections")
        if (self.algorithm == "given") != (not self.samples):
            raise ValueError("a table of given scales, and only that, has no samples")
        return self


@dataclass(frozen=True)
class CalibrationTable:
    """One amax (a float32 value, > 0) for each quantized tensor, keyed "<module path>:<role>".

    Attributes:
        algorithm, percentile: what chose the thresholds; percentile counts for its own algorithm alone. "given": they
            came with the model (`given_table`), and no sample was seen.
        amax: the scale of a tensor is amax / 127.
        digests: what the table belongs to: "data" and whatever the caller gave ("weights", "graph", ...).
        samples: sha256 of the content of each sample, by id.
        recipe: how stored samples became arrays.
        audit: what was seen, and warnings.
        histograms: what was counted of each tensor, in two halves; None when the table was read without them.
        histograms_sha256: digest of the file that holds them; None when there is none.
        corrections: what was corrected in the model for this table; None when nothing was tried.
    """

    algorithm: str
    percentile: float
    amax: Mapping[str, float]
    digests: Mapping[str, str]
    samples: Mapping[str, str]
    recipe: str
    audit: Audit
    histograms: Mapping[str, Halves] | None = field(default=None, repr=False, compare=False)
    histograms_sha256: str | None = None
    corrections: Corrections | None = field(default=None, compare=False)

    @property
    def digest(self) -> str:
        """sha256 hex of the whole table; it changes with anything in it."""
        return hashlib.sha256(canonical(self._content()).encode()).hexdigest()

    def scale(self, key: str) -> float:
        """float32 amax / 127 of one tensor.

        Raises:
            CalibError: the table has no such tensor.
        """
        if key not in self.amax:
            raise CalibError(
                f"table: must hold {key!r} (got {len(self.amax)} other tensors). Calibrate this model again."
            )
        return float(np.float32(self.amax[key]) / np.float32(INT8_MAX))

    def changed(self, digests: Mapping[str, str], algorithm: str, percentile: float = PERCENTILE) -> tuple[str, ...]:
        """What differs between this table and a job: names of digests, "algorithm", "percentile". Empty when it
        fits."""
        known = {*self.digests, *digests} - ({"data"} - digests.keys())
        names = [n for n in sorted(known) if self.digests.get(n) != digests.get(n)]
        if algorithm != self.algorithm:
            names.append("algorithm")
        elif algorithm == "percentile" and percentile != self.percentile:
            names.append("percentile")
        return tuple(names)

    def require(self, where: str, digests: Mapping[str, str], algorithm: str, percentile: float = PERCENTILE) -> None:
        """Refuse a table that belongs to something else.

        Raises:
            CalibError: naming everything that changed since it was made.
        """
        names = self.changed(digests, algorithm, percentile)
        if "weights" in names:  # of which the graph's digest is made too: whether the graph is another is not known
            names = tuple(n for n in names if n != "graph")
        if names and {"algorithm", "percentile"}.issuperset(names):
            made = f"{self.algorithm} {self.percentile:g}" if self.algorithm == "percentile" else self.algorithm
            wanted = f"{algorithm} {percentile:g}" if algorithm == "percentile" else algorithm
            raise CalibError(
                f"{where}: must be made by {wanted}, the job's algorithm (got one made by {made}). Leave algorithm and "
                "percentile out of the job, which then takes the table's, or calibrate again."
            )
        if other := ", ".join(names):
            raise CalibError(f"{where}: must belong to this job (got one for other {other}). Calibrate again.")

    def recomputed(self, algorithm: str) -> CalibrationTable:
        """The table that `algorithm` would have given on the same data, percentile at its default.

        Raises:
            CalibError: the table was read without its histograms.
        """
        table = replace(self, algorithm=algorithm, percentile=PERCENTILE).recounted(self._counted())
        made = self.corrections
        return replace(table, corrections=None if made is None else made.for_thresholds_of(algorithm))

    def recounted(self, counted: Mapping[str, Halves]) -> CalibrationTable:
        """The table that its algorithm makes of other counts from the same samples, as of a model with other weights.

        Raises:
            CalibError: a tensor that was never seen or held NaN or infinity, naming it.
        """
        return make_table(
            counted, self.algorithm, self.percentile, self.digests, self.samples, self.recipe,
            self.audit.batches, self.audit.batch_size, self.audit.coverage, self.audit.skipped,
        )  # fmt: skip

    def corrected(self, amax: Mapping[str, float], corrections: Corrections) -> CalibrationTable:
        """The table with the thresholds `amax` in place of its own, which belong to a model with `corrections`.

        Raises:
            CalibError: the table was read without its histograms.
        """
        now = {k: float(np.float32(amax.get(k, v))) for k, v in self.amax.items()}
        changed = {k: v for k, v in now.items() if v != self.amax[k]}
        audit = with_thresholds(self.audit, changed, self._counted(), self.algorithm, self.percentile)
        return replace(self, amax=now, audit=audit, corrections=corrections)

    def files(self, name: str) -> dict[str, bytes]:
        """What `save` writes, by file name: the histograms and corrections that are here, and the table as `name`."""
        files: dict[str, bytes] = {}
        if self.histograms is not None:
            files[histograms_path(Path(name)).name] = pack(self.histograms)
        if self.corrections is not None and self.corrections.arrays:
            files[corrections_path(Path(name)).name] = self.corrections.packed
        return files | {name: (canonical(self._content() | {"digest": self.digest}) + "\n").encode()}

    def save(self, path: str | Path) -> None:
        """Write the table, and its histograms beside it when they are here; each whole or not at all."""
        for name, data in self.files(Path(path).name).items():
            with replacing(Path(path).with_name(name), Path(path)) as sibling:
                sibling.write_bytes(data)

    @classmethod
    def load(cls, path: str | Path, histograms: bool = False) -> CalibrationTable:
        """A table read and fully validated; with `histograms`, those too, from the file beside it.

        Raises:
            CalibError: anything but a whole, unchanged table of this version.
        """
        where = Path(path)
        raw = parse(where)
        if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
            raise CalibError(f"{where}: is JSON, but no calibration table. Calibrate again.")
        version = raw.get("version")
        if type(version) is not int or version not in (PLAIN, CORRECTED):
            raise CalibError(
                f"{where}: must be of version {PLAIN} or {CORRECTED} (got {json.dumps(version)[:40]}). Calibrate again."
            )
        try:
            file = _TableFile.model_validate_json(json.dumps(raw))
        except ValidationError as error:
            more = error.error_count() - 1
            problem = first_problem(error).rstrip(".") + (f" ({more} more)" if more else "")
            raise CalibError(f"{where}: {problem}. Calibrate again.") from error
        amax = {k: float(np.float32(v)) for k, v in sorted(file.amax.items())}
        table = cls(
            file.algorithm, file.percentile, amax, file.digests, file.samples, file.recipe, file.audit,
            histograms_sha256=file.histograms_sha256,
        )  # fmt: skip
        if file.corrections is not None:
            kept = load_corrections(where, file.corrections.steps, file.corrections.sha256, file.corrections.none)
            table = replace(table, corrections=kept)
        _check(where, table)
        if table.digest != file.digest:
            got = f"got digest {table.digest[:12]}, not {file.digest[:12]}"
            raise CalibError(f"{where}: must be as it was written ({got}). Calibrate again.")
        return replace(table, histograms=_load_histograms(where, table)) if histograms else table

    @classmethod
    def merge(cls, tables: Sequence[CalibrationTable]) -> CalibrationTable:
        """The table of all shards' data: amax and histograms of one run over it, and halves as each shard dealt them.

        Raises:
            CalibError: no tables, tables without histograms or of different models, and samples in more than one.
        """
        if not tables:
            raise CalibError("merge: at least one table is needed.")
        first = tables[0]
        samples: dict[str, str] = {}
        for table in tables:
            if table.corrections is not None and table.corrections.steps:
                raise CalibError(
                    "merge: a shard has corrections, which cannot be merged. Calibrate with corrections: false."
                )
            names = [n for n in table.changed(first.digests, first.algorithm, first.percentile) if n != "data"]
            names += ["recipe"] if table.recipe != first.recipe else []
            names += ["tensors"] if table.amax.keys() != first.amax.keys() else []
            if names:
                raise CalibError(
                    f"merge: shards must be of one job (got different {', '.join(names)}). Calibrate again."
                )
            if twice := sorted(samples.keys() & table.samples.keys()):
                same = samples[twice[0]] == table.samples[twice[0]]
                step = "Shard the data without overlap" if same else "They differ: give each shard's files other names"
                raise CalibError(f"merge: each sample must be in one shard (got {twice[0]!r} in two). {step}.")
            samples |= table.samples
        parts = [t._counted() for t in tables]
        counted = {
            k: (Histogram.total(p[k][0] for p in parts), Histogram.total(p[k][1] for p in parts)) for k in parts[0]
        }
        coverage: dict[str, int] | None = {}
        for table in tables:
            if coverage is None or table.audit.coverage is None:
                coverage = None
                break
            coverage = {
                k: coverage.get(k, 0) + table.audit.coverage.get(k, 0) for k in {**coverage, **table.audit.coverage}
            }
        return make_table(
            counted, first.algorithm, first.percentile, first.digests, samples, first.recipe,
            sum(t.audit.batches for t in tables), max(t.audit.batch_size for t in tables), coverage,
            tuple(s for t in tables for s in t.audit.skipped),
        )  # fmt: skip

    def _counted(self) -> Mapping[str, Halves]:
        if self.histograms is None:
            raise CalibError("table: it was loaded without its histograms. Load it with histograms=True.")
        return self.histograms

    def _content(self) -> JsonObject:
        corrections: JsonObject = {}
        if self.corrections is not None:
            steps = [s.model_dump(mode="json") for s in self.corrections.steps]
            none = {"none": self.corrections.none} if self.corrections.none else {}
            corrections["corrections"] = {"steps": steps, "sha256": self.corrections.sha256, **none}
        return corrections | {
            "format": _FORMAT,
            "version": CORRECTED if corrections else PLAIN,
            "algorithm": self.algorithm,
            "percentile": self.percentile,
            "digests": dict(self.digests),
            "recipe": self.recipe,
            "samples": dict(self.samples),
            "amax": dict(self.amax),
            "audit": self.audit.model_dump(mode="json"),
            "histograms_sha256": self.histograms_sha256,
        }


def given_table(amax: Mapping[str, float], digests: Mapping[str, str]) -> CalibrationTable:
    """The table of a model that came with its scales: nothing was observed for it.

    Args:
        amax: 127 times the scale, by key.
        digests: what the table is valid for, by name.
    """
    audit = Audit(batches=0, batch_size=0, coverage=None, skipped=(), tensors={}, warnings=())
    exact = {key: float(np.float32(value)) for key, value in sorted(amax.items())}
    return CalibrationTable("given", 100.0, exact, {**digests, "data": combine_digests({}, "")}, {}, "", audit)


def make_table(
    counted: Mapping[str, Halves],
    algorithm: str,
    percentile: float,
    digests: Mapping[str, str],
    samples: Mapping[str, str],
    recipe: str,
    batches: int,
    batch_size: int,
    coverage: Mapping[str, int] | None,
    skipped: tuple[str, ...],
) -> CalibrationTable:
    """The table of what was counted: thresholds, audit, and the digest of the data added to `digests`.

    Raises:
        CalibError: a tensor that was never seen or held NaN or infinity, naming it.
    """
    if not counted:
        raise CalibError(NOTHING_TO_OBSERVE)
    chosen = {key: choose(key, halves, algorithm, percentile) for key, halves in sorted(counted.items())}
    tensors = {key: audit for key, (_, audit, _) in chosen.items()}
    collected = [warning for _, _, warning in chosen.values() if warning] + list(
        warnings_of(tensors, coverage, skipped)
    )
    audit = Audit(
        batches=batches,
        batch_size=batch_size,
        coverage=None if coverage is None else dict(coverage),
        skipped=skipped,
        tensors=tensors,
        warnings=tuple(collected),
    )
    return CalibrationTable(
        algorithm,
        nine_digits(percentile),
        {key: amax for key, (amax, _, _) in chosen.items()},
        {**digests, "data": combine_digests(dict(samples), recipe)},
        dict(samples),
        recipe,
        audit,
        dict(counted),
        hashlib.sha256(pack(counted)).hexdigest(),
    )


def _check(where: Path, table: CalibrationTable) -> None:
    """What a model of single fields cannot see: audits belong to the amax, the data's digest to the samples."""
    if table.algorithm != "given" and table.audit.tensors.keys() != table.amax.keys():
        odd = sorted(table.audit.tensors.keys() ^ table.amax.keys())[0]
        raise CalibError(
            f"{where}: amax and audit must name the same tensors (got {odd!r} in one of them). Calibrate again."
        )
    for key, seen in table.audit.tensors.items():
        most = DEAD_AMAX if seen.state == "dead" else seen.max
        if table.amax[key] > float(np.float32(most)):
            raise CalibError(
                f"{where}: amax of {key!r} must be at most {most:.6g}, what was seen (got {table.amax[key]:.6g}). "
                "Calibrate again."
            )
    if table.digests.get("data") != combine_digests(dict(table.samples), table.recipe):
        raise CalibError(f"{where}: digests.data is not that of the samples listed. Calibrate again.")


def _load_histograms(where: Path, table: CalibrationTable) -> Mapping[str, Halves]:
    path = histograms_path(where)
    if table.histograms_sha256 is None:
        raise CalibError(f"{where}: was written without histograms. Calibrate again.")
    try:
        data = read_regular(path)
        if hashlib.sha256(data).hexdigest() != table.histograms_sha256:
            raise CalibError(
                f"{path}: these are not the histograms of {where.name}: the digest differs. Calibrate again."
            )
        arrays = load(data)
        return {key: (unpack(arrays, key, 0), unpack(arrays, key, 1)) for key in table.amax}
    except OSError as error:
        raise CalibError(f"{path}: must be readable (got {error.strerror}). Calibrate again.") from error
    except (SafetensorError, KeyError, IndexError, ValueError) as error:
        if isinstance(error, CalibError):
            raise
        raise CalibError(f"{path}: must hold the histograms of {where.name} (got {error}). Calibrate again.") from error
