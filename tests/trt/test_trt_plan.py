from __future__ import annotations

import struct

import pytest

from trtpipe.errors import BuildError, InputError
from trtpipe.trt.plan import HEADER_BYTES, MAGICS, PlanHeader, misfits, own_header, read_header, split_prefix
from trtpipe.trt.platforms import RTX_COMPUTE_CAPABILITIES


def plan(magic=b"vtrt", *, version=(1, 7, 1, 116), mask=0x0C, body=b"weights", length=None, serialization=0):
    """A plan as its layout is written down, not as a builder made it."""
    size = 33 + len(body) if length is None else length
    return (
        magic + struct.pack("<I", serialization) + bytes(8) + struct.pack("<Q", size) + bytes(version)
        + b"vtrt" + bytes([mask]) + body
    )  # fmt: skip


def test_rtx():
    assert read_header(plan()) == PlanHeader("tensorrt_rtx", "1.7.1.116", ("8.6", "8.9"), 40)


@pytest.mark.parametrize(
    ("mask", "capabilities"),
    [
        (1, ("7.5",)),
        (2, ("8.0",)),
        (4, ("8.6",)),
        (8, ("8.9",)),
        (16, ("12.0",)),
        (32, ("12.1",)),
        (18, ("8.0", "12.0")),
    ],
)
def test_every_compute_capability(mask, capabilities):
    assert read_header(plan(mask=mask)).compute_capabilities == capabilities


def test_portable():
    header = read_header(plan(mask=0x7E))
    assert header.portable
    assert header.compute_capabilities == ()


def test_tensorrt_proper_names_no_gpu_and_no_length():
    header = read_header(plan(b"ftrt", version=(10, 16, 1, 11), length=7))
    assert header == PlanHeader("tensorrt", "10.16.1.11", (), None)


@pytest.mark.parametrize("magic", MAGICS)
def test_a_plan_that_was_cut_is_refused_as_far_as_its_header_tells(magic):
    whole = plan(magic)
    for length in range(len(whole)):
        if magic != b"vtrt" and length >= HEADER_BYTES:
            assert read_header(whole[:length]) == read_header(whole)
        else:
            with pytest.raises(InputError):
                read_header(whole[:length])


def test_a_capability_has_its_bit_by_its_place():
    """As observed, each built for alone."""
    observed = {"7.5": 0x01, "8.0": 0x02, "8.6": 0x04, "8.9": 0x08, "12.0": 0x10, "12.1": 0x20}
    assert tuple(observed) == RTX_COMPUTE_CAPABILITIES
    assert {read_header(plan(mask=bit)).compute_capabilities: bit for bit in observed.values()} == {
        (name,): bit for name, bit in observed.items()
    }


def test_a_version_is_only_read_where_its_place_is_known():
    assert read_header(plan(b"ptrt", version=(10, 3, 0, 0))).version == ""
    assert read_header(plan(b"ftrt", version=(10, 3, 0, 0), serialization=2)).version == ""


BEGIN = "model.engine: a plan must begin with ftrt, vtrt or ptrt"
LONG = "model.engine: the plan must be 40 bytes long, as its header says"
ITSELF = "Give the engine file itself."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", f"{BEGIN} (got b''). {ITSELF}"),
        (b"\x08\x08onnx", f"{BEGIN} (got b'\\x08\\x08on'). {ITSELF}"),
        (plan()[:20], "model.engine: a plan must hold at least 33 bytes (got 20). Copy the file again."),
        (plan()[:-1], f"{LONG} (got 39). Copy the file again."),
        (plan() + b"!", f"{LONG} (got 41). Copy the file again."),
        (plan(mask=0x80),
         "model.engine: the plan must be for compute capabilities among 7.5, 8.0, 8.6, 8.9, 12.0, 12.1 "
         "(got mask 0x80). It was written by a newer TensorRT-RTX: update trtpipe."),
        (plan(mask=0),
         "model.engine: the plan must be for compute capabilities among 7.5, 8.0, 8.6, 8.9, 12.0, 12.1 "
         "(got mask 0x00). It was written by a newer TensorRT-RTX: update trtpipe."),
        (struct.pack("<I", 2) + b"{}" + plan(b"ftrt"), f"{BEGIN} (got "
         "b'\\x02\\x00\\x00\\x00'). A length and 2 bytes of JSON stand before the plan, as some tools write: "
         "cut them off."),
    ],
)  # fmt: skip
def test_what_is_no_plan(data, message):
    with pytest.raises(InputError) as raised:
        read_header(data, "model.engine")
    assert str(raised.value) == message


def test_a_prepended_json_is_split_off():
    whole = plan(b"ftrt")
    assert split_prefix(struct.pack("<I", 10) + b'{"a": "b"}' + whole) == (b'{"a": "b"}', whole)
    assert split_prefix(whole) == (b"", whole)
    assert split_prefix(b"{}") == (b"", b"{}")


FOR_86 = PlanHeader("tensorrt_rtx", "1.7.1.116", ("8.6",), 40)
PORTABLE = PlanHeader("tensorrt_rtx", "1.7.1.116", (), 40, portable=True)
TENSORRT = PlanHeader("tensorrt", "10.3.0.26", (), None)


@pytest.mark.parametrize(
    ("header", "name", "version", "capability", "problems"),
    [
        (FOR_86, "tensorrt_rtx", "1.7.1.116", "8.6", ()),
        (PORTABLE, "tensorrt_rtx", "1.7.1.116", "8.0", ()),
        (PORTABLE, "tensorrt_rtx", "1.7.1.116", "12.0", ()),
        (TENSORRT, "tensorrt", "10.3.0", "5.3", ()),
        (PlanHeader("tensorrt", "", (), None), "tensorrt", "10.3.0", "5.3", ()),
        (FOR_86, "tensorrt_rtx", "1.7.1.116", "8.9",
         ("the GPU must be of compute capability 8.6 (got 8.9). Build the engine for this GPU.",)),
        (PORTABLE, "tensorrt_rtx", "1.7.1.116", "7.5",
         ("the GPU must be of compute capability 8.0 or later (got 7.5). Build the engine for this GPU.",)),
        (TENSORRT, "tensorrt", "10.16.1.11", "8.7",
         ("tensorrt must be 10.3.0.26, which wrote the plan (got 10.16.1.11). Install that version, or build the "
          "engine here.",)),
        (TENSORRT, "tensorrt_rtx", "1.7.1.116", "8.6",
         ("the plan must be one of tensorrt_rtx (got one of tensorrt). Load it with tensorrt.",)),
    ],
)  # fmt: skip
def test_misfits(header, name, version, capability, problems):
    assert misfits(header, name, version, capability) == problems


@pytest.mark.parametrize(("version", "loads"), [("10.16.1.11", True), ("11.0.0", True), ("10.3.0.11", True)])
def test_what_is_version_compatible_is_loaded_by_other_releases(version, loads):
    """Which of them do is TensorRT's own to say, and `runtime.compatibility`'s before."""
    assert (misfits(TENSORRT, "tensorrt", version, "8.7", version_compatible=True) == ()) == loads
    assert misfits(FOR_86, "tensorrt_rtx", "1.8.0", "8.6", version_compatible=True) != ()


@pytest.mark.parametrize(
    ("data", "loaded", "got"),
    [
        (plan(b"ftrt", version=(10, 16, 1, 11)), ("tensorrt", "10.16.1.11", None), None),
        (plan(b"ftrt", version=(10, 3, 0, 26)), ("tensorrt", "10.3.0", None), None),
        (plan(b"ftrt", version=(10, 3, 0, 26)), ("tensorrt", "10.3.0.26.post1", ()), None),
        (plan(b"ftrt", serialization=1), ("tensorrt", "11.0.0", None), None),  # which does not say its version
        (plan(b"ptrt"), ("tensorrt", "11.0.0", []), None),
        (plan(mask=0x7E), ("tensorrt_rtx", "1.7.1.116", []), None),
        (plan(), ("tensorrt_rtx", "1.7.1.116", ["8.9", "8.6"]), None),
        (plan(), ("tensorrt_rtx", "1.7.1.116", None), None),
        (plan(), ("tensorrt_rtx", "1.7.1.116", ["8.6"]), "TensorRT-RTX 1.7.1.116 for 8.6, 8.9"),
        (plan(mask=0x7E), ("tensorrt_rtx", "1.7.1.116", ["8.6"]),
         "TensorRT-RTX 1.7.1.116 for no compute capability in particular"),
        (plan(b"ftrt", version=(10, 1, 16, 2)), ("tensorrt", "10.1.1", None), "TensorRT 10.1.16.2"),
        (plan(b"ftrt", version=(10, 16, 1, 5)), ("tensorrt", "10.16.1.11", None), "TensorRT 10.16.1.5"),
        (plan(), ("tensorrt", "10.3.0", None), "TensorRT-RTX 1.7.1.116"),
        (plan(b"ptrt"), ("tensorrt_rtx", "1.7.1.116", None), "TensorRT 1.7.1.116"),
    ],
)  # fmt: skip
def test_a_plan_says_which_tensorrt_compiled_it(data, loaded, got):
    """Of every route: the same rule, by which it is loaded afterwards too."""
    if got is None:
        assert own_header(data, *loaded) == read_header(data)
        assert misfits(read_header(data), loaded[0], loaded[1], "8.6") == ()
        return
    with pytest.raises(BuildError) as raised:
        own_header(data, *loaded)
    assert f"(got {got}). Another TensorRT's library was loaded: check LD_LIBRARY_PATH." in str(raised.value)
