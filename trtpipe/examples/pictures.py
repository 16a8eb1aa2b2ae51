"""Made-up samples for the example jobs: they run where no data set is. Every call gives the same ones."""

from __future__ import annotations

import numpy as np

from calib.types import Array


class Pictures:
    """`count` smooth coloured patterns, float32 [3, side, side], each channel of about zero mean and unit variance."""

    def __init__(self, side: int, count: int = 16) -> None:
        self.side, self.count = side, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Array:
        if not 0 <= index < self.count:
            raise IndexError(index)
        random = np.random.default_rng(index)
        y, x = np.mgrid[0 : self.side, 0 : self.side].astype(np.float32) / self.side
        waves = [
            np.sin(2 * np.pi * (random.uniform(0.5, 6) * x + random.uniform(0.5, 6) * y + random.uniform()))
            for _ in range(3)
        ]
        noise = random.normal(0, 0.3, (3, self.side, self.side))
        return (1.3 * np.stack(waves) + noise).astype(np.float32)


class Pairs:
    """`count` samples of two inputs: `image` float32 [3, 64, 64] and `state` float32 [6], as of a robot arm."""

    def __init__(self, count: int = 32) -> None:
        self.pictures = Pictures(64, count)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Array]:
        state = np.random.default_rng(1000 + index).normal(0, 1, 6)
        return {"image": self.pictures[index], "state": state.astype(np.float32)}


def photos_224() -> Pictures:
    """Samples [3, 224, 224]."""
    return Pictures(224)


def photos_380() -> Pictures:
    """Samples [3, 380, 380]."""
    return Pictures(380, 8)


def photos_448() -> Pictures:
    """Samples [3, 448, 448]."""
    return Pictures(448, 8)


def photos_128() -> Pictures:
    """Samples [3, 128, 128]."""
    return Pictures(128, 32)


def pairs() -> Pairs:
    """Samples of two inputs."""
    return Pairs()
