"""What a rule of the job yields, and what rules of several sections share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from calib.files import suffix_of
from trtpipe.job.importable import is_reference
from trtpipe.job.sections import Normalize
from trtpipe.job.yamlfile import KeyPath

#: Inputs that take images, and that a normalization can be of.
IMAGE_DTYPES = ("float32", "float16", "uint8")
SPEEDUP: KeyPath = ("check", "limits", "speedup_over_fp16_min")


@dataclass(frozen=True)
class Broken:
    """`path` must `must` (got `got`). `hint` is the next step."""

    path: KeyPath
    must: str
    got: str
    hint: str = ""


class BrokenRules(ValueError):
    """Raised inside pydantic's validation of a whole Job; carries what is broken."""

    def __init__(self, problems: tuple[Broken, ...]) -> None:
        lines = (f"{'.'.join(map(str, p.path))}: must {p.must} (got {p.got}). {p.hint}".rstrip() for p in problems)
        super().__init__("\n".join(lines))
        self.problems = problems


def given(section: object, *fields: str) -> tuple[str, ...]:
    """Those of `fields` that are set."""
    return tuple(f for f in fields if getattr(section, f) is not None)


def changed(section: BaseModel) -> tuple[str, ...]:
    """Fields that differ from their default; a job that was written out in full and read again keeps its meaning."""
    fields = type(section).model_fields
    return tuple(f for f, i in fields.items() if getattr(section, f) != i.get_default(call_default_factory=True))


def joined_names(names: tuple[str, ...]) -> str:
    """Names in a list, or none."""
    return " and ".join(names) if names else "none"


def named_callable(value: str | None, path: KeyPath) -> Iterator[Broken]:
    """A reference has the form of one."""
    if value is not None and not is_reference(value):
        dotted = ":".join(value.rsplit(".", 1))
        hint = f"Did you mean {dotted}?" if ":" not in value and is_reference(dotted) else ""
        yield Broken(path, "be package.module:callable", repr(value), hint)


def suffixed(value: str | None, path: KeyPath, legal: tuple[str, ...]) -> Iterator[Broken]:
    """A file name ends in what its format ends in."""
    if value is not None and suffix_of(value) not in legal:
        yield Broken(path, f"end in {' or '.join(legal)}", repr(value))


def listed(items: tuple[object, ...]) -> str:
    """As YAML writes a list."""
    return f"[{', '.join(map(str, items))}]"


def normalization(value: Normalize, path: KeyPath, channels: int | str | None) -> Iterator[Broken]:
    """Mean and std fit each other and the channels."""
    if len(value.mean) != len(value.std):
        yield Broken(path, "have as many std as mean", f"{len(value.mean)} mean, {len(value.std)} std")
    elif isinstance(channels, int) and len(value.mean) not in (1, channels):
        yield Broken(path, f"have one mean and std, or {channels} (one a channel)", str(len(value.mean)))
    for i, std in enumerate(value.std):
        if not std > 0:
            yield Broken((*path, "std", i), "be greater than 0", str(std))
