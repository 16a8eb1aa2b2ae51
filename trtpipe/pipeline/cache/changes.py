"""What changed in what a job is made of, in words."""

from __future__ import annotations

from trtpipe.pipeline.cache.reads import NAMES
from trtpipe.pipeline.cache.settings import shown as shown_setting

#: What was only asked for: the answer may be that of the very code that asks, like a folder that it makes.
ASKED = tuple(f"{NAMES[kind]} " for kind in ("presence", "status", "rights", "attributes"))


#: Before the name of an installed distribution whose version counts, as a module of its is imported.
DISTRIBUTION = "distribution "


def is_read(name: str) -> bool:
    """Whether an ingredient is what the job's code read."""
    return name.partition(" ")[0] in NAMES.values()


def rank(name: str) -> int:
    """The position of a change in a report: the most important first."""
    order = ("weights", "program", "onnx", "torchscript", "source", *NAMES.values(), "job", "calibration", "check")
    order = (*order, "version", "gpu", "cuda")
    return next((i for i, word in enumerate(order) if name.startswith(word)), len(order))


_READ_AS = {
    NAMES["file"]: "{}, read by the job's code,",
    NAMES["journal"]: "{}, beside a database that the job's code reads,",
    NAMES["folder"]: "the list of files in {}",
    NAMES["presence"]: "whether the job's code finds {}",
    NAMES["status"]: "the size, time, rights or owner of {}, asked for by the job's code,",
    NAMES["rights"]: "what may be done with {}, asked for by the job's code,",
    NAMES["attributes"]: "the extended attributes of {}, asked for by the job's code,",
    NAMES["place"]: "the current folder, from which the job's code names files,",
}


def change(name: str, before: str | None, now: str | None) -> str:
    """What became of an ingredient, as a line: added, removed, or from what to what; None where it was not there, as a
    key of the job is not that has its value by default."""
    short, shown = (
        name,
        name.startswith(("job ", "version ", "path "))
        or name in ("gpu", "cuda driver", "system", "timing cache", "name"),
    )
    for prefix in ("job ", "version "):
        short = short.removeprefix(prefix)
    if is_read(name):
        what, _, path = name.partition(" ")
        short = _READ_AS[what].format(path)
    elif f" source {DISTRIBUTION}" in f" {name}":
        short, shown = name.rpartition(" ")[2], True
    elif " source " in f" {name}" and name != "trtpipe source":
        short = f"source of {name.rpartition(' ')[2]}"
    if name.startswith("job "):
        before, now = (text and shown_setting(text) for text in (before, now))
    if before is None or now is None:
        gone = "removed, or set to its default" if name.startswith("job ") else "removed"
        new = "added, or no longer its default" if name.startswith("job ") else "added"
        what = new if before is None else gone
        return f"{short} {what}" + (f" ({before or now})" if shown else "")
    return f"{short} {_cut(before)} -> {_cut(now)}" if shown else f"{short} changed"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
