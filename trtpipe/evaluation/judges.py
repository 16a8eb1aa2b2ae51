"""A metric of the job as a `Judge`: built in, or a callable of the job's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from calib.strictjson import first_problem
from calib.types import Array
from calib.user_code import import_callable
from trtpipe.errors import InputError
from trtpipe.evaluation.judgement import Judge
from trtpipe.evaluation.standard import STANDARD
from trtpipe.job.limits import OwnMetric


def judge(name: str, metric: OwnMetric, *, labelled: bool) -> Judge:
    """The metric `name` of a job; a callable's module must be on the path.

    Args:
        name: its name in `check.metrics`.
        metric: what the job says of it.
        labelled: whether the samples have labels. A built-in metric is otherwise against the baseline.

    Raises:
        InputError: there is no such callable, it does not take the arguments, or it needs labels.
    """
    where = f"check.metrics.{name}"
    args = dict(metric.args)
    truth: Callable[[Array], Array] | None = None
    if metric.built_in:
        function, truth = STANDARD[metric.function]
        against = args.pop("against", "labels" if labelled or truth is None else "baseline")
        if against not in ("labels", "baseline") or (against == "baseline" and truth is None):
            legal = "labels" if truth is None else "labels or baseline"
            raise InputError(f"{where}.args.against: must be {legal} (got {against}).")
        if against == "labels":
            truth = None
            if not labelled:
                raise InputError(f"{where}: {metric.function} needs labels. Give check.labels.")
    else:
        function = import_callable(metric.function, f"{where}.function", InputError)
    try:
        inspect.signature(function).bind({}, None, (), **args)
    except TypeError as error:
        raise InputError(
            f"{where}: the function must take (outputs, labels, ids) and args (got {metric.function}: {error}). "
            "Correct its arguments."
        ) from None
    except ValueError:  # one without a signature to read is believed
        pass
    if metric.built_in:
        _require_values(where, function, args)
    reference = "" if metric.built_in else metric.function
    return Judge(name, function, args, metric.larger_is_better, metric.built_in, truth, reference)


def _require_values(where: str, function: Callable[..., object], args: Mapping[str, object]) -> None:
    """Hold the values of arguments against the function's own types."""
    types = get_type_hints(function, include_extras=True)
    for name, value in args.items():
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            raise InputError(f"{where}.args.{name}: {first_problem(error)} (got {value!r}). Correct it.") from None
