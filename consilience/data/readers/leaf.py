"""LEAF's JSON: users, how many samples each has, and each user's x and y, spread over many files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid
from consilience.data.readers.tables import read_json


def read_leaf(folder: Path) -> Iterator[tuple[str, list[Any], list[Any], Path]]:
    """(user, x, y, file) of every user of every JSON file in a folder, in file and user order."""
    paths = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no .json file: it should hold the output of LEAF's preprocess.sh")
    for path in paths:
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("user_data"), dict):
            raise Invalid(f"{path} is not a LEAF file: it must have 'users', 'num_samples' and 'user_data'")
        users = content.get("users", list(content["user_data"]))
        counts = content.get("num_samples", [None] * len(users))
        if len(users) != len(counts):
            raise Invalid(f"{path} lists {len(users)} users but {len(counts)} values in num_samples")
        for user, count in zip(users, counts):
            x, y = _samples(path, content["user_data"], user)
            if len(x) != len(y) or (count is not None and count != len(y)):
                raise Invalid(f"{path}: user {user!r} has {len(x)} x and {len(y)} y where num_samples says {count}")
            yield str(user), x, y, path


def _samples(path: Path, data: dict[str, Any], user: Any) -> tuple[list[Any], list[Any]]:
    samples = data.get(user)
    if (
        not isinstance(samples, dict)
        or not isinstance(samples.get("x"), list)
        or not isinstance(samples.get("y"), list)
    ):
        raise Invalid(f"{path}: user {user!r} has no lists x and y in user_data")
    return samples["x"], samples["y"]
