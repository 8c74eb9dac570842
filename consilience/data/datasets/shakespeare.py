"""Shakespeare's plays by speaking role: predict the next character."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from consilience.core.settings import Count, Invalid
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.splits import HeldOut
from consilience.data.datasets.prepare.texts import PADDING, UNKNOWN
from consilience.data.readers.files import source
from consilience.data.readers.tables import read_json_lines

HOME = (
    "It holds one JSON object a line with play, speaker and text, in play order; the plays are at "
    "https://www.ibiblio.org/xml/examples/shakespeare."
)


def shakespeare(
    *,
    window: Count = 80,
    min_characters: Count = 160,
    max_windows: Count | None = None,
    test_fraction: HeldOut = 0.2,
    data_dir: str | Path | None = None,
) -> Dataset:
    """`window` characters of a role's text -> the next one; every (play, speaker) role is a group.

    The first part of each role trains and the last `test_fraction` of its characters is predicted in the
    test. One window at every character, or `max_windows` of a role's training windows, evenly spaced.
    """
    path = source("shakespeare", data_dir, how=HOME).find("speeches.jsonl")
    roles = _roles(path, min_characters)
    cuts = {role: len(text) - max(int(len(text) * test_fraction), 1) for role, text in roles.items()}
    roles = {role: text for role, text in roles.items() if cuts[role] > window}
    if not roles:
        raise Invalid(f"{path}: no role has {min_characters} characters and {window} of them before its test part")
    alphabet = sorted(set().union(*(text[: cuts[role]] for role, text in roles.items())))
    number = np.ones(0x110000, np.int64)  # code point -> token number, 1 where it is unknown
    number[[ord(character) for character in alphabet]] = np.arange(2, 2 + len(alphabet))
    most_test = None if max_windows is None else max(int(max_windows * test_fraction), 1)
    parts: list[list[np.ndarray]] = [[], []]
    counts: list[list[int]] = [[], []]
    for role, text in roles.items():
        ids = number[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
        ends = ((window, cuts[role], max_windows), (cuts[role], len(ids), most_test))
        for part, (first, last, most) in enumerate(ends):
            parts[part].append(_windows(ids, window, first, last, most))
            counts[part].append(len(parts[part][-1]))
    train, test = (np.concatenate(windows) for windows in parts)
    return assemble(
        "shakespeare",
        (train[:, :-1], train[:, -1]),
        (test[:, :-1], test[:, -1]),
        classes=len(alphabet) + 2,
        groups=np.repeat(np.arange(len(roles)), counts[0]),
        test_groups=np.repeat(np.arange(len(roles)), counts[1]),
        group_names=tuple(f"{play}: {speaker}" for play, speaker in roles),
        label_names=(PADDING, UNKNOWN, *alphabet),
        vocabulary=(PADDING, UNKNOWN, *alphabet),
    )


def _roles(path: Path, min_characters: int) -> dict[tuple[str, str], str]:
    """(play, speaker) -> all the role says, in play order, for roles that say enough."""
    speeches: dict[tuple[str, str], list[str]] = {}
    for record in read_json_lines(path, ("play", "speaker", "text")):
        speeches.setdefault((str(record["play"]), str(record["speaker"])), []).append(str(record["text"]))
    roles = {role: "\n".join(texts) for role, texts in sorted(speeches.items())}
    return {role: text for role, text in roles.items() if len(text) >= min_characters}


def _windows(ids: np.ndarray, window: int, first: int, last: int, most: int | None) -> np.ndarray:
    """[n, window + 1]: the characters before and at each predicted place in first .. last - 1, evenly spaced.

    A test window may look back into training text; the character it predicts is never in training.
    """
    count = last - first if most is None else min(most, last - first)
    places = first + np.arange(count) * (last - first) // max(count, 1)
    return np.lib.stride_tricks.sliding_window_view(ids, window + 1)[places - window]
