"""Folders and metadata of distributions, read once where many jobs ask the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
from PIL import Image

from calib import folders
from calib.once import read_once
from trtpipe import packages
from trtpipe.pipeline.validate import judge


def test_within_the_block_each_is_read_once_and_outside_of_it_each_time() -> None:
    asked: list[str] = []

    def version(name: str) -> str:
        asked.append(name)
        if name == "absent":
            raise metadata.PackageNotFoundError(name)
        return f"{len(asked)}.0"

    def twice() -> list[str | None]:
        return [packages._read(version, name) for name in ("here", "absent", "here", "absent")]

    assert twice() == ["1.0", None, "3.0", None]
    with read_once():
        assert twice() == ["5.0", None, "5.0", None]
        with read_once():
            assert twice() == ["5.0", None, "5.0", None]
        assert twice() == ["5.0", None, "5.0", None]
    assert twice() == ["7.0", None, "9.0", None]
    assert Counter(asked) == {"here": 5, "absent": 5}


@pytest.mark.parametrize("files", [1, 3])
def test_of_many_jobs_no_distribution_is_read_oftener_than_of_one(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file, and in several."""
    (tmp_path / "job.yaml").write_text(
        "name: a\nmatrix: {check.seed: {x: 1, y: 2, z: 3}}\nmodel: {factory: 'torch.nn:Identity'}\n"
        "inputs: {x: {shape: [1, 4]}}\noutputs: {y: {}}\nbuild: {target: tensorrt_rtx}\ncheck: {arrays: x.npy}\n"
    )
    asked: Counter[str] = Counter()
    real = metadata.version

    def version(name: str) -> str:
        asked[name] += 1
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    with read_once() if files > 1 else nullcontext():
        found = [judge(tmp_path / "job.yaml") for _ in range(files)]
    assert all(len(jobs) == 3 and jobs == found[0] for jobs in found)
    assert set(asked.values()) == {1}
    assert packages.version("torch") == real("torch")


def test_of_many_jobs_a_folder_of_images_is_listed_no_oftener_than_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images" / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a" / "0.png")
    (tmp_path / "job.yaml").write_text(
        "name: a\nmatrix: {check.seed: {x: 1, y: 2, z: 3}}\nmodel: {factory: 'torch.nn:Identity'}\n"
        "inputs: {x: {shape: [1, 3, 8, 8]}}\noutputs: {y: {}}\nbuild: {target: onnxruntime}\n"
        "precision: {int8_mode: true}\ncalibration: {images: images}\ncheck: {images: images}\n"
    )
    listed: Counter[str] = Counter()
    real = folders.below

    def below(folder: str | Path) -> Iterator[folders.Listing]:
        listed[str(folder)] += 1
        return real(folder)

    def most() -> int:
        listed.clear()
        judge(tmp_path / "job.yaml")
        return max(listed.values())

    monkeypatch.setattr(folders, "below", below)
    one = tmp_path / "one.yaml"
    one.write_text((tmp_path / "job.yaml").read_text().replace("matrix: {check.seed: {x: 1, y: 2, z: 3}}\n", ""))
    judge(one)
    alone = dict(listed)
    assert most() == max(alone.values())
    (tmp_path / "images" / "a" / "0.png").unlink()
    ((_, problems), *_) = judge(tmp_path / "job.yaml")
    assert any("holds no image" in p.message for p in problems), "another block, which looks again"
