"""Trees of picture files in which a folder's name is the class (and, above it, the part or the group)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from consilience.core.settings import Invalid
from consilience.data.readers.pictures import find_pictures
from consilience.data.readers.tables import read_table

Layout = Literal["auto", "classes", "splits", "groups", "tiny_imagenet"]
VALIDATION = ("val", "valid", "validation")
EXPECTED = "It should hold <class>/*.png, or train/<class>/*.png and test/<class>/*.png, or <group>/<class>/*.png."


class PictureFile(NamedTuple):
    """The path of a picture, and its class, group and part by its folders."""

    path: Path
    label: str
    group: str = ""
    part: str = ""  # "train", "test", or "" where the tree does not say


def list_tree(top: Path, layout: Layout, *, use_validation: bool) -> list[PictureFile]:
    """All pictures below `top`, by the layout given or recognised; validation pictures train or are left out."""
    if layout == "auto":
        layout = _recognise(top)
    if layout == "classes":
        return _list_classes(top)
    if layout == "groups":
        return [picture for group in _groups(top) for picture in _list_group(group)]
    if layout == "tiny_imagenet":
        return _list_tiny_imagenet(top)
    test = top / "test"
    extra = next((top / name for name in VALIDATION if (top / name).is_dir()), None)
    if not test.is_dir():
        if extra is None:
            raise FileNotFoundError(f"{top} has train but neither test nor {', '.join(VALIDATION)}. {EXPECTED}")
        test, extra = extra, None  # without a test folder, validation pictures are the test
    listing = _list_classes(top / "train", part="train") + _list_classes(test, part="test")
    if use_validation and extra is not None:
        listing += _list_classes(extra, part="train")
    return listing


def _recognise(top: Path) -> Layout:
    if (top / "train").is_dir():
        return "tiny_imagenet" if (top / "val" / "val_annotations.txt").is_file() else "splits"
    if any(find_pictures(folder) for folder in _folders(top)):
        return "classes"
    return "groups"


def _list_classes(top: Path, *, group: str = "", part: str = "") -> list[PictureFile]:
    listing = [
        PictureFile(path, folder.name, group, part) for folder in _folders(top) for path in find_pictures(folder)
    ]
    if not listing:
        raise FileNotFoundError(f"no pictures were found in the folders of {top}. {EXPECTED}")
    return listing


def _groups(top: Path) -> list[Path]:
    """The folders whose own folders hold pictures (Stanford Dogs has one of annotations beside them)."""
    groups = [folder for folder in _folders(top) if any(find_pictures(child) for child in _folders(folder))]
    if not groups:
        raise FileNotFoundError(f"no pictures were found below {top}. {EXPECTED}")
    return groups


def _list_group(folder: Path) -> list[PictureFile]:
    """One group; DomainNet's <group>_train.txt and <group>_test.txt, where they lie beside it, decide the parts."""
    listing = _list_classes(folder, group=folder.name)
    lists = {part: folder.with_name(f"{folder.name}_{part}.txt") for part in ("train", "test")}
    if not all(path.is_file() for path in lists.values()):
        return listing
    part_of = {
        folder.parent / line.rsplit(" ", 1)[0]: part  # a line is "clipart/dog/clipart_01.jpg 12"
        for part, path in lists.items()
        for line in path.read_text().splitlines()
    }
    absent = part_of.keys() - {picture.path for picture in listing}
    if absent:
        raise FileNotFoundError(f"{lists['train']} or {lists['test']} names {min(absent)}, which is not there")
    return [picture._replace(part=part_of[picture.path]) for picture in listing if picture.path in part_of]


def _list_tiny_imagenet(top: Path) -> list[PictureFile]:
    """train/<class>/images/*.JPEG, and val/images/*.JPEG with their classes in val_annotations.txt."""
    listing = [
        PictureFile(path, folder.name, part="train")
        for folder in _folders(top / "train")
        for path in find_pictures(folder / "images")
    ]
    annotations = top / "val" / "val_annotations.txt"
    header = ("file", "class", "left", "top", "right", "bottom")
    table = read_table(annotations, separator="\t", header=header)
    known = {picture.label for picture in listing}
    for name, label in zip(table.column("file"), table.column("class")):
        path = top / "val" / "images" / name
        if label not in known:
            raise Invalid(f"{annotations}: {name} is of class {label!r}, for which {top / 'train'} has no folder")
        if not path.is_file():
            raise FileNotFoundError(f"{annotations} names {path}, which is not there: unpack the archive again")
        listing.append(PictureFile(path, label, part="test"))
    return listing


def _folders(top: Path) -> list[Path]:
    if not top.is_dir():
        raise FileNotFoundError(f"the folder {top} was not found. {EXPECTED}")
    return sorted(path for path in top.iterdir() if path.is_dir() and path.name[0] != ".")
