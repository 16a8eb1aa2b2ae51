"""The trials of a search on disk: the file is written after every trial, and the next run continues from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationError

from calib.files import read_regular
from calib.frozen import Frozen
from calib.strictjson import first_problem, loads
from trtpipe.atomic import write_whole
from trtpipe.errors import InputError
from trtpipe.jsontext import json_text
from trtpipe.quantization.ranking import Sensitivity
from trtpipe.quantization.search import Candidate, Trial

_Format = Literal["trtpipe-trials"]


class _TrialsFile(Frozen):
    """The file, field by field; infinities are strings, as `jsontext` writes them."""

    format: _Format
    version: Literal[1]
    key: Annotated[dict[str, str], Field(min_length=1)]
    rankings: dict[str, Sensitivity]
    trials: tuple[Trial, ...]


@dataclass
class Trials:
    """Trials and rankings of one job on one set of data, kept in a file.

    `key` are the digests of what they are valid for, by name; `notes` say whether an existing file was used.
    Mutable: each new trial is added, here and in the file.
    """

    path: Path
    key: Mapping[str, str]
    trials: list[Trial] = field(default_factory=list)
    rankings: dict[str, Sensitivity] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, key: Mapping[str, str]) -> Trials:
        """The content of the file if it has the same key; nothing, with a note, if it has another.

        Raises:
            InputError: the file was not written by `Trials`.
        """
        record = cls(path, dict(key))
        try:
            text = read_regular(path).decode("utf-8")
        except FileNotFoundError:
            return record
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: must be a file of trials (got {error}). Remove it to start afresh.") from None
        try:
            file = _TrialsFile.model_validate_json(json.dumps(loads(text)))
        except (ValueError, RecursionError) as error:
            why = first_problem(error) if isinstance(error, ValidationError) else error
            raise InputError(f"{path}: must be a file of trials (got {why}). Remove it to start afresh.") from None
        other = sorted(n for n in {*file.key, *key} if file.key.get(n) != key.get(n))
        if other:
            record.notes.append(
                f"{path.name}: its trials were made before a change of {', '.join(other)}; started afresh"
            )
            return record
        record.trials, record.rankings = list(file.trials), dict(file.rankings)
        if file.trials:
            record.notes.append(f"{path.name}: {len(file.trials)} trials of an earlier run were taken up")
        return record

    def require_repeats(self, evaluate: Callable[[Candidate], Trial]) -> None:
        """Evaluate one trial of the file again, the last that passed or else the last, and forget all of them, with a
        note, where it ends otherwise: something counts that no digest of `key` knows of."""
        if not self.trials:
            return
        known = next((t for t in reversed(self.trials) if t.passed), self.trials[-1])
        again = evaluate(known.candidate)
        if (again.passed, again.metrics, again.problems) != (known.passed, known.metrics, known.problems):
            found = f"{self.path.name}: {len(self.trials)} trials were judged otherwise than now; started afresh"
            self.trials, self.notes = [again], [found]
            self._write()

    def trial(self, candidate: Candidate, evaluate: Callable[[Candidate], Trial]) -> Trial:
        """The trial of a candidate: the one of the file, or a new one, which is added to the file."""
        for known in self.trials:
            if known.candidate == candidate:
                return known
        new = evaluate(candidate)
        self.trials.append(new)
        self._write()
        return new

    def ranking(self, algorithm: str, rank: Callable[[str], Sensitivity]) -> Sensitivity:
        """The sensitivities under one algorithm: those of the file, or new ones, which are added to the file."""
        if algorithm not in self.rankings:
            self.rankings[algorithm] = rank(algorithm)
            self._write()
        return self.rankings[algorithm]

    def _write(self) -> None:
        content = {
            "format": get_args(_Format)[0],
            "version": 1,
            "key": dict(self.key),
            "rankings": self.rankings,
            "trials": self.trials,
        }
        write_whole(self.path, json_text(content))
