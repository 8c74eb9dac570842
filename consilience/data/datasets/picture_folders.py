"""Picture folders with one folder per class: CINIC-10, DomainNet, Stanford Dogs, Tiny-ImageNet and similar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from consilience.core.settings import Count, Invalid, OnlyWith, Whole, nearest
from consilience.core.stored_rows import stored
from consilience.data.dataset import Dataset, NewRows
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.encoded import features_of, refuse_idle_pooling, refuse_unknown_encoder
from consilience.data.datasets.prepare.pictures import Normalise, picture_statistics, shift_pictures
from consilience.data.datasets.prepare.splits import HeldOut, at_most, held_out
from consilience.data.datasets.prepare.stored import Keeping, PictureFiles, stored_statistics
from consilience.data.readers.files import chosen_source
from consilience.data.readers.picture_trees import EXPECTED, Layout, PictureFile, list_tree
from consilience.data.readers.pictures import SUFFIXES, Fit, find_pictures, read_pictures
from consilience.models.encoders import Pooling
from consilience.stores.array_files import pixel_scaling

HOMES = (
    "CINIC-10: https://datashare.ed.ac.uk/handle/10283/3192, DomainNet: https://ai.bu.edu/M3SDA, Stanford Dogs: "
    "http://vision.stanford.edu/aditya86/ImageNetDogs, Tiny-ImageNet: http://cs231n.stanford.edu/tiny-imagenet-200.zip."
)


def picture_folders(
    *,
    folder: str,
    size: Count | None = None,
    fit: Annotated[Fit, OnlyWith("size")] = "crop",
    grey: bool = False,
    layout: Layout = "auto",
    validation: Literal["drop", "train"] = "drop",
    classes: tuple[str, ...] = (),
    groups: tuple[str, ...] = (),
    max_per_class: Count | None = None,
    normalise: Normalise = "standard",
    encoder: str | None = None,
    pooling: Annotated[Pooling | None, OnlyWith("encoder")] = None,
    rows: Keeping = "memory",
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Pictures in class folders, below `train` and `test`, or below a folder for each group (DomainNet's styles).

    Every picture is resized to size x size by `fit`; `classes` and `groups` keep only those named, and
    `max_per_class` at most so many of each class in each group. Test rows are drawn where no folder has them.
    With `encoder`, the folder or installed package of a vision transformer or a model of the zoo (random weights), x is
    the encoding of each picture, [N, features]: of a transformer the first token's state (`pooling="cls"`, unless
    given) or the mean of all tokens.
    rows: "file" decodes pictures as batches need them, with the same results; "memory" all at the start.
    """
    if encoder is not None:
        _refuse_unencodable(encoder, pooling, grey, normalise)
        if rows == "file":
            raise Invalid("rows = 'file' keeps pictures in their files, but encoder reads all of them: leave one out")
    pooled: Pooling = pooling or "cls"
    place = chosen_source(folder, data_dir, how=f"{EXPECTED} {HOMES}")
    top = place.places[0]
    listing = list_tree(top, layout, use_validation=validation == "train")
    listing = _thin(_keep_named(listing, classes, groups, top), max_per_class, seed)
    class_names, label = np.unique([picture.label for picture in listing], return_inverse=True)
    group_names, owner = np.unique([picture.group for picture in listing], return_inverse=True)
    train, test = _split(listing, label, owner, test_fraction, seed)
    paths = [picture.path for picture in listing]
    reading: dict[str, Any] = {"size": size, "fit": fit, "grey": grey}
    statistics = None
    if rows == "file":
        files = PictureFiles(paths, **reading)
        statistics, side = stored_statistics(files, train, normalise), files.shape[-1]
        whole = stored(files, pixel_scaling(*statistics))
        x, test_x = (whole.take(part) for part in (train, test))  # type: tuple[Any, Any]
    else:
        pictures = read_pictures(paths, **reading)
        side = pictures.shape[-1]
        if encoder is None:
            statistics = picture_statistics(pictures[train], normalise)
            x, test_x = (shift_pictures(pictures[part], *statistics) for part in (train, test))
        else:
            encoded = features_of(pictures, encoder=encoder, pooling=pooled)
            x, test_x = encoded[train], encoded[test]
    grouped = len(group_names) > 1
    return assemble(
        place.name,
        (x, label[train]),
        (test_x, label[test]),
        classes=len(class_names),
        groups=owner[train] if grouped else None,
        test_groups=owner[test] if grouped else None,
        group_names=tuple(str(name) for name in group_names) if grouped else (),
        label_names=tuple(str(name) for name in class_names),
        read_rows=PictureRows(
            size=size or side, fit=fit, grey=grey, statistics=statistics, encoder=encoder, pooling=pooled
        ),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class PictureRows:
    """Reads new pictures as the training pictures were read."""

    size: int
    fit: Fit
    grey: bool
    statistics: tuple[np.ndarray, np.ndarray] | None  # of the training pictures; None with an encoder
    encoder: str | None
    pooling: Pooling

    def __call__(self, path: Path) -> NewRows:
        """One picture, or all directly in a folder."""
        paths = find_pictures(path) if path.is_dir() else [path]
        if not paths:
            raise Invalid(f"{path} holds no pictures ({', '.join(SUFFIXES)})")
        pictures = read_pictures(paths, size=self.size, fit=self.fit, grey=self.grey)
        names = tuple(picture.name for picture in paths)
        if self.statistics is not None:
            return NewRows(x=shift_pictures(pictures, *self.statistics), names=names)
        assert self.encoder is not None
        return NewRows(x=features_of(pictures, encoder=self.encoder, pooling=self.pooling), names=names)


def _refuse_unencodable(encoder: str, pooling: Pooling | None, grey: bool, normalise: Normalise) -> None:
    refuse_unknown_encoder("encoder", encoder)
    if pooling is not None:
        refuse_idle_pooling(pooling, encoder)
    if grey:
        raise Invalid("grey = true leaves one channel, but encoders expect colour pictures: leave one of them out")
    if normalise != "standard":
        raise Invalid(f"normalise = {normalise!r} has no effect with encoder = {encoder!r}: leave one of them out")


def _keep_named(
    listing: list[PictureFile], classes: Sequence[str], groups: Sequence[str], top: Path
) -> list[PictureFile]:
    present = {"class": {picture.label for picture in listing}, "group": {picture.group for picture in listing}}
    for kind, wanted in (("class", classes), ("group", groups)):
        for name in wanted:
            if name not in present[kind]:
                raise Invalid(f"{top} has no {kind} {name!r}{nearest(name, present[kind])}")
    return [
        picture
        for picture in listing
        if (not classes or picture.label in classes) and (not groups or picture.group in groups)
    ]


def _thin(listing: list[PictureFile], most: int | None, seed: int) -> list[PictureFile]:
    """At most `most` pictures of each class, group and part, drawn by the seed."""
    if most is None:
        return listing
    cells: dict[tuple[str, str, str], list[int]] = {}
    for row, picture in enumerate(listing):
        cells.setdefault((picture.part, picture.group, picture.label), []).append(row)
    kept = [rows[k] for rows in cells.values() for k in at_most(np.zeros(len(rows)), most, seed=seed)]
    return [listing[row] for row in sorted(kept)]


def _split(
    listing: list[PictureFile], label: np.ndarray, owner: np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows: as the folders say, and a seeded draw among the rest."""
    part = np.array([picture.part for picture in listing])
    rest = np.flatnonzero(part == "")
    train, test = held_out(label[rest], fraction=fraction, seed=seed, groups=owner[rest])
    return (
        np.concatenate([np.flatnonzero(part == "train"), rest[train]]),
        np.concatenate([np.flatnonzero(part == "test"), rest[test]]),
    )
