"""Whatever stands in a job file, reading it ends in a job or in problems, never in a traceback."""

import copy
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import GOOD

from trtpipe.job import yamlfile
from trtpipe.job.job import Job
from trtpipe.job.load import JobFile

DATA = yamlfile.parse(GOOD).data
NAMES = "N min max opt shape dims dtype images normalize x a.b image logits transform limits keep profiles factory"
KEYS = st.sampled_from([*Job.model_fields, *NAMES.split(), ""])
ODD = st.sampled_from(["a:b", "N", "../x", "w.safetensors", "8.6", "uint8", "yes", "~"])
LEAVES = st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | KEYS | ODD
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=4), max_leaves=8)


def places(value, path=()):
    """The path of every mapping value and list item below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(data, path, value):
    *outer, last = path
    for key in outer:
        data = data[key]
    data[last] = value


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(sorted(places(DATA), key=str)), VALUES), min_size=1, max_size=3), st.data())
def test_any_change_of_a_good_job(tmp_path, changes, draw):
    data = copy.deepcopy(DATA)
    for path, value in changes:
        try:
            changed(data, path, value)
        except (KeyError, IndexError, TypeError):  # an earlier change took it away
            continue
        if draw.draw(st.booleans()) and isinstance(value, dict):
            value[draw.draw(KEYS)] = draw.draw(VALUES)
    read(tmp_path, json.dumps(data).replace("NaN", ".nan").replace("Infinity", ".inf"))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VALUES)
def test_anything_at_all(tmp_path, value):
    read(tmp_path, json.dumps(value).replace("NaN", ".nan").replace("Infinity", ".inf"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(KEYS, st.sampled_from(["", ".x", ".N.min", ".images"]), VALUES), max_size=3))
def test_any_override(tmp_path, overrides):
    read(tmp_path, GOOD, [f"{key}{more}={json.dumps(value)}" for key, more, value in overrides])


def read(folder, text, overrides=()):
    path = folder / "job.yaml"
    path.write_text(text)
    file = JobFile(path, paths_exist=False)
    job = file.read(overrides)
    assert (job is None) <= bool(file.problems)
    for problem in file.problems:
        assert " must " in str(problem) or "must hold" in str(problem), str(problem)
        assert "(got " in str(problem), str(problem)
        assert "\n" not in str(problem)
