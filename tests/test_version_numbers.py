"""Versions as numbers, as their packages write them."""

import pytest

from trtpipe.model.torch_versions import release
from trtpipe.version_numbers import of_cuda, parse_version, sm


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10.16.1.11", (10, 16, 1, 11)),
        ("8.6.1", (8, 6, 1)),
        ("8.6.1.6-1+cuda11.8", (8, 6, 1, 6)),
        ("10.3.0.post1", (10, 3, 0)),
        ("10", (10, 0, 0)),
        ("2.7.0a0+7c8ec84dab.nv25.03", (2, 7, 0)),
        ("unknown", ()),
        ("", ()),
    ],
)
def test_parse_version(text, number):
    assert parse_version(text) == number


def test_versions_and_capabilities_as_cuda_and_nvidia_write_them():
    assert [of_cuda(n) for n in (13000, 12040, 11080, 12080)] == ["13.0", "12.4", "11.8", "12.8"]
    assert [sm(c) for c in ("7.5", "8.9", "12.1")] == ["75", "89", "121"]


@pytest.mark.parametrize(("text", "number"), [("2.14.1+cu130", (2, 14)), ("2", (2, 0)), ("unknown", (0, 0))])
def test_a_release_of_pytorch_has_two_numbers(text, number):
    assert release(text) == number
