"""model.hybrid: what was written is read again, and nothing else is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hybrids import BIAS, STEPS, hybrid, plan_bytes
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from trtpipe.bundle.hybrid import EngineStep, Hybrid, OperatorStep, allowed, from_bytes, to_bytes
from trtpipe.errors import InputError

AGAIN = "Fetch or build the bundle again."


def test_what_is_written_is_read_again_and_always_the_same_bytes():
    data = to_bytes(hybrid())
    assert from_bytes(data, "h") == hybrid()
    assert to_bytes(from_bytes(data, "h")) == data
    parts = load(data)
    assert sorted(parts) == ["engine:0", "engine:1", "plan", "tensor:c0"]
    assert all(a.dtype == np.uint8 for a in parts.values())
    assert parts["tensor:c0"].tobytes() == BIAS.tobytes()


def test_eleven_engines_keep_their_order():
    engines = tuple(plan_bytes(size=64 + i) for i in range(11))
    steps = tuple(
        EngineStep(engine=i, inputs=("x",), args=({"value": "image"},), outputs=("y",), out=f"e{i}") for i in range(11)
    )
    base = hybrid(steps=steps, outputs={"logits": {"value": "e10"}}, constants={})
    made = Hybrid(base.plan, engines, {})
    assert from_bytes(to_bytes(made), "h").engines == engines


def rewritten(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with its plan changed behind the writer's back, in canonical form."""
    parts = dict(load(to_bytes(hybrid())))
    plan = json.loads(parts["plan"].tobytes())
    change(plan)
    text = json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()
    return bytes(save({**parts, "plan": np.frombuffer(text, np.uint8)}))


def in_step(number: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan["steps"][number].update(fields)


NOT_ITSELF = "h: the plan must agree with itself and its parts (got: {}). " + AGAIN
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda p: p.update(version=2), "h: the plan must be of version 1 (got 2). Update trtpipe."),
    "unknown key": (lambda p: p.update(code="x"), "h: the plan must follow its schema (got code: "),
    "a file is mapped": (in_step(1, op="aten.from_file.default"), NOT_ITSELF.format(
        "operator aten.from_file.default, which is not allowed")),
    "an argument is written to": (in_step(1, op="aten.relu_.default"), NOT_ITSELF.format(
        "operator aten.relu_.default, which is not allowed")),
    "another library": (in_step(1, op="profiler._record_function_enter.default"), "h: the plan must follow its schema"),
    "Python's own": (in_step(1, op="python.eval"), "h: the plan must follow its schema (got steps.1."),
    "an attribute": (in_step(1, op="aten.__class__.__mro__.x"), "h: the plan must follow its schema"),
    "a value too early": (in_step(0, args=[{"value": "sum"}]), NOT_ITSELF.format("value sum read before it is there")),
    "a constant that is missing": (in_step(2, args=[{"tensor": "c9"}]), NOT_ITSELF.format(
        "constant c9, which is not there")),
    "two inputs of one name": (lambda plan: plan.update(inputs=plan["inputs"] * 2), NOT_ITSELF.format(
        "two inputs have one name")),
    "two values of one name": (in_step(2, out="odd"), NOT_ITSELF.format("two values called odd")),
    "an engine twice": (in_step(3, engine=0), NOT_ITSELF.format("engines [0, 0] executed, of 2")),
    "an engine that is missing": (in_step(3, engine=7), NOT_ITSELF.format("engines [0, 7] executed, of 2")),
    "too few arguments": (in_step(3, args=[]), NOT_ITSELF.format("engine 1 with 0 arguments for 1 inputs")),
    "an argument of another kind": (in_step(1, args=[{"eval": "1"}]), NOT_ITSELF.format(
        "an argument must be one of value, tensor, dtype, device, layout, memory_format, float (got ['eval'])")),
    "an argument of two kinds": (in_step(1, args=[{"value": "first", "tensor": "c0"}]), NOT_ITSELF.format(
        "an argument must be one of value, tensor, dtype, device, layout, memory_format, float "
        "(got ['tensor', 'value'])")),
    "nested too deeply": (in_step(1, args=[[[[[[[[[[1]]]]]]]]]]), NOT_ITSELF.format(
        "arguments must not be nested so deeply")),
    "no such number": (in_step(1, args=[{"float": "1"}]), NOT_ITSELF.format("number 1")),
    "a constant of another size": (lambda p: p["constants"]["c0"].update(shape=[4]), NOT_ITSELF.format(
        "constant c0 of 12 bytes, not 16")),
    "a constant of no size": (lambda p: p["constants"]["c0"].update(shape=[-3]), "h: the plan must follow its schema"),
    "nothing": (lambda p: p.update(steps=[]), "h: the plan must follow its schema (got steps: "),
    "an output of nothing": (lambda p: p.update(outputs={"logits": {"value": "third"}}), NOT_ITSELF.format(
        "value third read before it is there")),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_plan_that_is_not_right_is_refused(name):
    change, text = HOSTILE[name]
    with pytest.raises(InputError) as caught:
        from_bytes(rewritten(change), "h")
    assert str(caught.value).startswith(text)


def test_parts_that_are_not_right_are_refused():
    parts = dict(load(to_bytes(hybrid())))

    def refused(parts: dict[str, Any]) -> str:
        with pytest.raises(InputError) as caught:
            from_bytes(bytes(save(parts)), "h")
        return str(caught.value)

    assert refused({**parts, "code": parts["plan"]}) == (
        f"h: must hold a plan, engines and constants alone (got code). {AGAIN}"
    )
    assert "(got engine:01)" in refused({**parts, "engine:01": parts["engine:1"]})
    assert refused({**parts, "plan": parts["plan"].astype(np.int8)}).startswith("h: plan must be uint8 [bytes] (got i")
    assert refused({n: a for n, a in parts.items() if n != "plan"}).startswith("h: the plan must be JSON (got: ")
    assert "constants other than the plan's" in refused({n: a for n, a in parts.items() if n != "tensor:c0"})
    loose = np.frombuffer(b" " + parts["plan"].tobytes(), np.uint8)
    assert "it is not in canonical form" in refused({**parts, "plan": loose})
    with pytest.raises(InputError, match=r"h: must be a safetensors file \(got: "):
        from_bytes(b"PK\3\4", "h")


def test_a_plan_that_is_too_long(monkeypatch):
    data = to_bytes(hybrid())
    monkeypatch.setattr("trtpipe.bundle.hybrid._MAX_PLAN_BYTES", 10)
    with pytest.raises(InputError) as caught:
        from_bytes(data, "h")
    assert str(caught.value) == f"h: the plan must be at most 10 bytes (got {len(load(data)['plan'])}). {AGAIN}"


def test_what_does_not_fit_together_is_not_written():
    with pytest.raises(InputError, match="engines \\[0, 1\\] executed, of 1"):
        to_bytes(replace(hybrid(), engines=(plan_bytes(),)))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_file_is_refused_or_still_a_hybrid(at, flip):
    data = bytearray(to_bytes(hybrid()))
    data[at % len(data)] ^= flip
    try:
        found = from_bytes(bytes(data), "h")
    except InputError:
        return
    assert all(not isinstance(s, OperatorStep) or allowed(s.op) for s in found.plan.steps)


def test_operators_that_are_allowed():
    for op in ("aten.relu.default", "aten.__and__.Scalar", "trtpipe.dequantize_beside.default", "python.getitem"):
        assert allowed(op)
    for op in ("", "aten.relu", "aten.relu_.default", "os.system.default", "python.setitem", "trtpipe.run.default"):
        assert not allowed(op)
    assert all(not isinstance(s, OperatorStep) or allowed(s.op) for s in STEPS)
