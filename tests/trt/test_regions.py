"""Which operations lie between Q/DQ, by hand and as a property of random graphs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtpipe.trt.regions import Operation, int8_regions


def operations(text):
    """`kind: inputs > outputs` on each line; kinds are q, dq, c and o."""
    kinds = {"q": "quantize", "dq": "dequantize", "c": "constant", "o": "other"}
    made = []
    for line in text.strip().splitlines():
        kind, _, rest = line.strip().partition(":")
        inputs, _, outputs = rest.partition(">")
        made.append(Operation(kinds[kind], tuple(inputs.split()), tuple(outputs.split())))
    return made


def test_what_follows_an_int8_convolution_up_to_the_next_q_is_its_own():
    """Conv, sigmoid and mul (SiLU) between Q/DQ; then a softmax, which goes to the output."""
    found = int8_regions(
        operations("""
            q: image > a
            dq: a > b
            c: > w
            dq: w > dw
            o: b dw > conv
            o: conv > sigmoid
            o: conv sigmoid > mul
            q: mul > c
            dq: c > d
            o: d dw > last
            o: last > softmax
        """)
    )
    assert found == {4, 5, 6, 9}


def test_a_tensor_that_also_goes_elsewhere_is_not_enclosed():
    found = int8_regions(operations("dq: x > a\no: a > conv\no: conv > relu\nq: relu > b\no: relu > out"))
    assert found == {1}


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 12))
    made = []
    for k in range(count):
        kind = draw(st.sampled_from(["quantize", "dequantize", "constant", "other", "other", "other"]))
        inputs = () if kind == "constant" else tuple(
            draw(st.lists(st.sampled_from([f"t{j}" for j in range(k)] or ["in"]), min_size=1, max_size=2))
        )  # fmt: skip
        made.append(Operation(kind, inputs, (f"t{k}",)))
    return made


@given(graphs())
def test_the_set_is_closed_and_the_largest(ops):
    """Against its definition, by brute force over single additions."""
    found = int8_regions(ops)
    kinds = {f"t{k}": o.kind for k, o in enumerate(ops)}
    fed = {k for k, o in enumerate(ops) if o.kind == "other" and any(kinds.get(n) == "dequantize" for n in o.inputs)}

    def closed(members):
        for k in members - fed:
            for name in ops[k].inputs:
                maker = int(name[1:]) if name != "in" else None
                if maker is None or not (ops[maker].kind in ("dequantize", "constant") or maker in members):
                    return False
            readers = [r for r, o in enumerate(ops) if f"t{k}" in o.inputs]
            if not readers or any(ops[r].kind != "quantize" and r not in members for r in readers):
                return False
        return True

    assert fed <= found <= {k for k, o in enumerate(ops) if o.kind == "other"}
    assert closed(set(found))
    rest = [k for k, o in enumerate(ops) if o.kind == "other" and k not in found]
    for bits in range(1, 1 << min(len(rest), 8)):
        more = {k for i, k in enumerate(rest[:8]) if bits >> i & 1}
        assert not closed(set(found) | more)
