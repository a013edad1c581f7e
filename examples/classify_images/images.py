"""A dataset of images in one folder per class, and a generator of a small synthetic dataset."""

import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Dataset

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"}
SHAPES = {"circles": (220, 60, 60), "squares": (60, 200, 60), "triangles": (70, 90, 230)}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet statistics


class ImageFolder(Dataset):
    """Images of shape (3, size, size) with class indices; classes are sorted folder names.

    Args:
        root: folder that contains one folder of images per class.
        size: height and width of the scaled images, in pixels.
        held_out: True for the test images (every fifth image of a class), False for the training
            images.
    """

    def __init__(self, root: Path, size: int, *, held_out: bool) -> None:
        self.size, self.held_out = size, held_out
        self.classes = sorted(
            folder.name
            for folder in root.iterdir()
            if folder.is_dir() and not folder.name.startswith(".")
        )
        self.samples: list[tuple[Path, int]] = []
        for label, name in enumerate(self.classes):
            # The sorted order makes the split equal on all processes and in all runs.
            files = sorted(
                path for path in (root / name).rglob("*") if path.suffix.lower() in SUFFIXES
            )
            self.samples += [
                (path, label) for index, path in enumerate(files) if (index % 5 == 4) == held_out
            ]
        if len(self.classes) < 2 or not self.samples:
            raise SystemExit(
                f"{root} needs a folder of images for each of at least two classes, "
                "with at least five in each"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            pixels = (
                np.asarray(image.convert("RGB").resize((self.size, self.size)), dtype=np.float32)
                / 255.0
            )
        tensor = torch.from_numpy(((pixels - MEAN) / DEVIATION).astype(np.float32)).permute(2, 0, 1)
        if not self.held_out and torch.rand(()) < 0.5:
            tensor = tensor.flip(2)
        return tensor.contiguous(), label


def make_images(root: Path, per_class: int = 60, size: int = 64) -> None:
    """Write missing images of three synthetic classes; concurrent calls write the same files."""
    for name, colour in SHAPES.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            path = root / name / f"{number:04}.png"
            if not path.exists():
                temporary = path.with_suffix(f".{random.SystemRandom().getrandbits(64):x}")
                _draw(name, colour, size, random.Random(f"{name} {number}")).save(
                    temporary, format="png"
                )
                temporary.replace(path)  # atomic: no process reads half an image


def _draw(
    name: str, colour: tuple[int, int, int], size: int, generator: random.Random
) -> Image.Image:
    image = Image.new("RGB", (size, size), tuple(generator.randint(0, 60) for _ in range(3)))
    radius = generator.uniform(0.2, 0.45) * size
    x, y = (generator.uniform(radius, size - radius) for _ in range(2))
    fill = tuple(min(255, max(0, part + generator.randint(-40, 40))) for part in colour)
    canvas = ImageDraw.Draw(image)
    if name == "circles":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    else:
        corners, turn = (4 if name == "squares" else 3), generator.uniform(0, math.tau)
        angles = [turn + math.tau * corner / corners for corner in range(corners)]
        canvas.polygon(
            [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles],
            fill=fill,
        )
    return image
