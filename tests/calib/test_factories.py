"""Samples from an importable callable."""

import numpy as np
import pytest
import torch

from calib.data import open_source
from calib.errors import CalibError
from calib.samples import DataSpec, InputSpec

X = InputSpec("x", "float32", (2,))
Y = InputSpec("y", "uint8", (1,))
MODULE = """
import numpy as np, torch

def columns(): return {"x": np.zeros((5, 2), np.float32)}
def arrays(): return [np.full(2, i, np.float32) for i in range(5)]
def pair(i): return {"x": torch.full((2,), float(i)), "y": torch.full((1,), i, dtype=torch.uint8)}
def labelled(): return [(pair(i), i % 2) for i in range(6)]
def wide(): return [np.full(2, i, np.float64) for i in range(5)]
def stream():
    for i in range(4): yield np.full(2, i, np.float32), np.int64(i)
def reused():
    buffer = np.zeros(2, np.float32)
    for i in range(5):
        buffer[:] = i
        yield buffer
def reused_tensor():
    buffer = torch.zeros(2)
    for i in range(5): yield buffer.fill_(i)
class Reused:
    def __init__(self): self.buffer = np.zeros(2, np.float32)
    def __len__(self): return 5
    def __getitem__(self, i):
        self.buffer[:] = i
        return {"x": self.buffer}
class Dataset:
    targets = [0, 1, 1]
    def __len__(self): return 3
    def __getitem__(self, i): return torch.full((2,), float(i)), self.targets[i]
class Indexed(torch.utils.data.Dataset):
    def __getitem__(self, i):
        if i > 2: raise IndexError(i)
        return np.full(2, i, np.float32)
def indexed(): return Indexed()
def endless():
    i = 0
    while True:
        yield np.full(2, i, np.float32)
        i += 1
calls = []
def fickle():
    calls.append(1)
    for i in range(3 if len(calls) == 1 else 1): yield np.full(2, i, np.float32)
def loader(): return torch.utils.data.DataLoader(arrays(), batch_size=2)
class Torn:
    labels = True
    def __len__(self): return 6
    def __getitem__(self, i):
        if i == 2: raise FileNotFoundError("part 2")
        if i == 4: return None
        return (np.full(2, i, np.float32), i % 2) if self.labels else np.full(2, i, np.float32)
class TornUnlabelled(Torn):
    labels = False
class AllTorn(Torn):
    def __getitem__(self, i): raise ValueError(i)
def nothing(): return []
def number(): return 7
def triple(): return [(1, 2, 3)]
def words(): return ["ab"]
def masked(): return [np.ma.masked_equal(np.zeros(2), 0)]
def mixed(): return [(np.zeros(2), 1), np.zeros(2)]
def not_finite(): return [np.zeros(2), np.array([1.0, np.inf])]
one = 1
"""


@pytest.fixture(autouse=True)
def factories(tmp_path, monkeypatch):
    (tmp_path / "factories_under_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    import sys

    sys.modules.pop("factories_under_test", None)


def opened(name, inputs=(X,), **options):
    return open_source(DataSpec(factory=f"factories_under_test:{name}", **options), inputs)


def values(source):
    return np.concatenate([b.arrays["x"] for b in source.batches(2)])[:, 0].tolist()


def test_a_list_of_arrays():
    source = opened("arrays")
    assert sorted(values(source)) == [0, 1, 2, 3, 4]
    assert values(source) == values(source)
    assert source.labels is None
    assert values(source) == [float(i.partition("[")[2][:-1]) for i in source.ids]


@pytest.mark.parametrize("name", ["reused", "reused_tensor", "Reused"])
def test_samples_that_share_a_buffer_are_as_many_as_they_seem(name):
    assert sorted(values(opened(name))) == [0, 1, 2, 3, 4]


def test_several_inputs_with_labels():
    source = opened("labelled", (X, Y), samples=4)
    assert sorted(source.labels.tolist()) == [0, 0, 1, 1]
    batch = next(iter(source.batches(4)))
    assert batch.arrays["y"].dtype == np.uint8
    assert batch.arrays["x"][:, 0].tolist() == batch.arrays["y"][:, 0].tolist()


def test_content_is_the_same_in_every_dtype():
    assert sorted(opened("wide").sample_digests) == sorted(opened("arrays").sample_digests)


def test_a_torch_dataset_by_workers():
    source = opened("Dataset", workers=1)
    assert sorted(values(source)) == [0, 1, 2]
    assert sorted(source.labels.tolist()) == [0, 1, 1]


@pytest.mark.parametrize(("path", "labels"), [("Torn", [0, 1, 1, 1]), ("TornUnlabelled", None)])
def test_an_item_that_cannot_be_had_is_a_bad_sample(path, labels):
    with pytest.raises(
        CalibError, match=r"^factory: factories_under_test:Torn\w*\[2\] raised FileNotFoundError: part 2"
    ):
        opened(path)
    for workers in (0, 1):
        source = opened(path, on_bad_sample="skip", workers=workers)
        assert sorted(values(source)) == [0, 1, 3, 5]
        assert (None if labels is None else sorted(source.labels.tolist())) == labels
        assert len(source.skipped) == 2
        assert [f"[{at}]" in " ".join(source.skipped) for at in range(6)] == [at in (2, 4) for at in range(6)]
    with pytest.raises(CalibError, match=r"no sample could be used \(got 6 bad ones\)"):
        opened("AllTorn", on_bad_sample="skip")


def test_an_iterable_is_used_in_its_order_and_again():
    source = opened("stream")
    assert values(source) == values(source) == [0, 1, 2, 3]
    assert source.labels.tolist() == [0, 1, 2, 3]
    assert opened("stream", samples=2).digest != source.digest
    assert values(opened("endless", samples=3)) == [0, 1, 2]
    assert (source.total_count, opened("stream", samples=2).total_count, opened("arrays").total_count) == (4, None, 5)


def test_an_iterable_without_an_end_is_refused_where_no_number_is_given(monkeypatch):
    monkeypatch.setattr("calib.factories.MOST_READ", 4)
    assert values(opened("stream")) == [0, 1, 2, 3]  # as many as may be
    with pytest.raises(CalibError) as caught:
        opened("endless")
    assert str(caught.value) == (
        "factory factories_under_test:endless: an iterable must end within 4 samples (got more). Set samples, which "
        "takes the first ones, or return a sequence."
    )
    assert values(opened("endless", samples=6)) == [0, 1, 2, 3, 4, 5]


def test_the_digest_covers_values_and_code(tmp_path):
    assert opened("arrays").digest == opened("arrays").digest != opened("stream").digest


def test_what_is_read_by_index_alone_ends_where_its_indices_do():
    """As a torch Dataset without a length, and as `iter` has it."""
    assert values(opened("indexed")) == [0, 1, 2]


def test_an_iterable_that_changes_its_mind():
    source = opened("fickle")
    with pytest.raises(CalibError, match=r"gave fewer samples than before"):
        values(source)


def test_bad_values_are_skipped_when_asked():
    with pytest.raises(CalibError, match=r"not_finite\[1\]: every value of input 'x' must be finite"):
        values(opened("not_finite"))
    assert values(opened("not_finite", on_bad_sample="skip")) == [0.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, r"holds no samples"),
        ("loader", {}, r"loader: must give samples \(got batches of a DataLoader\)\. Return its dataset\.$"),
        ("number", {}, r"must give a sequence or an iterable of samples \(got int\)\. Return a list\.$"),
        ("columns", {}, r"must give a sequence or an iterable of samples \(got dict\)\. Return a list\.$"),
        ("one", {}, r"must be package\.module:callable \(got 'factories_under_test:one'\)"),
        ("missing", {}, r"must be package\.module:callable \(got 'factories_under_test:missing'\)"),
        ("triple", {}, r"triple\[0\]: a sample must be an array, .* \(got a tuple of 3\)"),
        ("masked", {}, r"masked\[0\]: a sample must have no masked values \(got some\)\. Fill them: numpy\.ma\.filled"),
        ("words", {}, r"words\[0\]: a sample must be an array of numbers \(got str of <U2\)"),
        ("mixed", {}, r"some samples have a label and others have none"),
        ("arrays", {"inputs": (X, Y)}, r"arrays\[0\]: must be \{input: array\} for 2 inputs \(got ndarray\)"),
        ("labelled", {}, r"labelled\[0\]: must hold the inputs \['x'\] \(got \['x', 'y'\]\)"),
        ("stream", {"workers": 1}, r"must give a sequence for worker processes .* \(got an iterable, workers 1\)"),
        ("stream", {"samples": 5}, r"must hold at least 5 samples \(got 4\)"),
    ],
)
def test_bad_factories(name, options, message):
    with pytest.raises(CalibError, match=message):
        opened(name, **options)


def test_tensors_that_need_gradients():
    from calib.images import to_array

    assert to_array("", torch.ones(2, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["labelled", "reused_tensor", "Dataset"])
def test_samples_are_made_on_the_cpu_wherever_the_model_is_computed(name):
    """They are asked for while torch makes new tensors on the model's device."""
    source = opened(name, inputs=[X, Y] if name == "labelled" else [X])
    plain = list(source.batches(2))
    with torch.device("meta"):
        there = list(source.batches(2))
    assert len(plain) == len(there) > 0
    for a, b in zip(plain, there, strict=True):
        assert all(np.array_equal(a.arrays[n], b.arrays[n]) for n in a.arrays)
