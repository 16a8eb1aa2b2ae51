"""Arguments, options and output of the commands that take a bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from trtpipe.bundle.format import Sign
from trtpipe.bundle.signing import DEVICE_KEYS, KEY_VARIABLE, signer
from trtpipe.cli.commands.options import InputPath
from trtpipe.values import CheckReport, Metric

F = TypeVar("F", bound=Callable[..., object])


def bundle_argument(function: F) -> F:
    """`BUNDLE`: a bundle's directory."""
    return click.argument("bundle", type=InputPath())(function)


def key_option(function: F) -> F:
    """`--key`: public keys, one of which must have signed."""
    return click.option(
        "--key",
        type=InputPath(piped=True, dir_okay=False),
        help="Refuse the bundle unless one of the public keys in this file signed it. "
        f"[default: ${KEY_VARIABLE}, {DEVICE_KEYS}]",
    )(function)


def sign_option(function: F) -> F:
    """`--sign`: the private key to sign with."""
    return click.option(
        "--sign",
        type=InputPath(piped=True, dir_okay=False),
        metavar="KEY",
        help="Sign what passed with this private key (see keygen).",
    )(function)


def graph_option(function: F) -> F:
    """`--graph`: the ONNX graph on the CPU in the engine's place."""
    return click.option("--graph", is_flag=True, help="Use the ONNX graph, on the CPU, instead of the engine.")(
        function
    )


def signing(sign: Path | None) -> Sign | None:
    """What signs by the private key that is given, if one is; read once, before work begins.

    Raises:
        InputError: it is none.
    """
    return None if sign is None else signer(sign)


def report_lines(report: CheckReport) -> list[str]:
    """A check's figures, each beside its limit."""
    word = "passed" if report.passed else "FAILED"
    return [
        f"{word}: {report.executed} executed by {report.runner} on {report.samples} golden samples",
        *figure_lines(report),
    ]


def figure_lines(report: CheckReport) -> list[str]:
    """A check's figures, each beside its limit, and what it says beside them."""
    return [*(metric_line(f"{m.output}.{m.name}", m) for m in report.metrics), *said_lines(report)]


def said_lines(report: CheckReport) -> list[str]:
    """What a check says beside its figures."""
    lines = [f"  problem: {problem}" for problem in report.problems]
    lines += [f"  warning: {warning}" for warning in report.warnings]
    return lines + [f"  note: {note}" for note in report.notes]


def metric_line(label: str, metric: Metric, spread: str = "") -> str:
    """A figure beside its limit; `spread` is what is said of its uncertainty."""
    mark = "" if metric.passed is None else "ok" if metric.passed else "FAILED"
    limit = f"limit {metric.limit_text}" if metric.limit_text else ""
    return f"  {label:<28} {metric.value_text:<12} {limit:<14} {mark:<7} {spread}".rstrip()
