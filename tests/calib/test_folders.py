"""What a folder of pictures holds: torchvision's order, links followed, nothing left out without a word."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from calib.data import open_source
from calib.errors import CalibError
from calib.folders import below, class_folders, has_images, images_below, unread
from calib.samples import DataSpec, InputSpec, TransformSpec

NAMES = st.sampled_from(["a", "b", "b.png", "a b", "a-b", "A", "1", "10", "2", "é", "x.PNG", "x.txt", "x.jpeg"])
INPUTS = (InputSpec("image", "float32", (3, 4, 4)),)


def touched(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(NAMES, min_size=2, max_size=4).map("/".join), min_size=1, max_size=12))
def test_the_order_and_the_classes_are_torchvisions(tmp_path_factory: pytest.TempPathFactory, files: list[str]) -> None:
    """Thresholds are of the samples that were drawn, which depend on the order."""
    from torchvision.datasets import ImageFolder

    root = tmp_path_factory.mktemp("tree")
    for name in files:
        if not any((root / p).is_file() for p in Path(name).parents) and not (root / name).is_dir():
            touched(root, name)
    dataset = ImageFolder(str(root), allow_empty=True)
    source = open_source(DataSpec(images=str(root)), INPUTS) if dataset.samples else None
    assert tuple(class_folders(root)) == tuple(dataset.classes)
    paths = [p for name in class_folders(root) for p in images_below(root / name)]
    assert [str(p) for p in paths] == [path for path, _ in dataset.samples]
    if source is not None:
        assert source.labels is not None
        assert dict(zip(source.ids, source.labels.tolist(), strict=True)) == {
            os.path.relpath(path, root): label for path, label in dataset.samples
        }


def test_links_are_followed_and_what_is_hidden_is_left_out(tmp_path: Path) -> None:
    root = touched(
        tmp_path / "p", "cat/a.png", "cat/.b.png", "cat/.notes", "cat/.thumbs/c.png", ".ipynb_checkpoints/d.png"
    )
    touched(tmp_path / "disk", "e.png", "deep/f.png")
    (root / "dog").symlink_to(tmp_path / "disk")
    (root / "cat" / "g.png").symlink_to(tmp_path / "disk" / "e.png")
    source = open_source(DataSpec(images=str(root)), INPUTS)
    assert sorted(source.ids) == ["cat/a.png", "cat/g.png", "dog/deep/f.png", "dog/e.png"]
    assert source.classes == ("cat", "dog")
    assert unread("photos", root, classes=True) == (
        "photos: pictures or folders are hidden and not read: their names begin with a dot (3, first: "
        ".ipynb_checkpoints).",
    )
    assert has_images(root / "dog")
    (tmp_path / "disk" / "e.png").unlink()
    (tmp_path / "disk" / "deep" / "f.png").rename(tmp_path / "disk" / "deep" / ".f.png")
    assert not has_images(root / "dog")


def test_hidden_folders_are_no_classes_of_a_folder_without(tmp_path: Path) -> None:
    root = touched(tmp_path, "a.png", ".ipynb_checkpoints/a.png")
    source = open_source(DataSpec(images=str(root)), INPUTS)
    assert (source.ids, source.classes) == (("a.png",), None)


def unreadable(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """As another user's folder: what is root may list those all the same."""
    real, closed = os.scandir, str(root / "cat" / "more")

    def scandir(path: str | Path) -> Iterator[os.DirEntry[str]]:
        if os.fspath(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), closed)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return f"{closed}: must be a readable folder (got Permission denied). Make it readable, or remove it."


def gone(root: Path, _: pytest.MonkeyPatch) -> str:
    (root / "dog").symlink_to("/annex/gone")
    return (
        f"{root}/dog: must lead to a file or a folder (got No such file or directory). Repair the link, or remove it."
    )


def circle(root: Path, _: pytest.MonkeyPatch) -> str:
    (root / "cat" / "again").symlink_to(".")
    return f"{root}/cat/again: leads back to a folder above it, so it has no end. Remove the link."


@pytest.mark.parametrize("fault", [unreadable, gone, circle])
def test_what_cannot_be_listed_is_an_error(
    fault: Callable[[Path, pytest.MonkeyPatch], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = touched(tmp_path / "p", "cat/a.png", "cat/more/b.png")
    said = fault(root, monkeypatch)
    for on_bad_sample in ("error", "skip"):  # a sample may be skipped, and not an unknown number of them
        with pytest.raises(CalibError, match=f"^{re.escape(said)}$"):
            open_source(DataSpec(images=str(root), on_bad_sample=on_bad_sample), INPUTS)  # type: ignore[arg-type]
    with pytest.raises(CalibError, match=f"^{re.escape(said)}$"):
        unread("p", root, classes=True)


def test_a_picture_whose_link_leads_nowhere_is_one_bad_sample(tmp_path: Path) -> None:
    root = tmp_path / "p"
    (root / "cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(root / "cat" / "a.png")
    (root / "cat" / "b.png").symlink_to("/annex/gone.png")
    (root / "cat" / "c.png").symlink_to("c.png")
    (root / "cat" / "d.gif").symlink_to("/annex/gone.gif")
    os.mkfifo(root / "cat" / "e.png")
    assert [at.files for at in below(root)] == [(), ("a.png", "b.png", "c.png", "d.gif", "e.png")]
    source = open_source(DataSpec(images=str(root), transform=TransformSpec(), on_bad_sample="skip"), INPUTS)
    assert [batch.ids for batch in source.batches(8)] == [("cat/a.png",)]
    assert sorted(s.partition(":")[0] for s in source.skipped) == ["cat/b.png", "cat/c.png", "cat/e.png"]
