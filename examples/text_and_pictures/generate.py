"""Writes rows of text, pictures and a table: `python examples/text_and_pictures/generate.py`, then run the config."""

import argparse
import csv
from pathlib import Path

import numpy as np

KINDS = ("bruise", "burn", "rash")
WORDS = {"bruise": ("dark", "swollen"), "burn": ("red", "hot"), "rash": ("itchy", "spotted")}
SIDE = 16


def picture(kind: int, rng: np.random.Generator) -> np.ndarray:
    """[16, 16, 3] noise, brighter in the channel of the kind inside a square."""
    pixels = rng.integers(60, 180, (SIDE, SIDE, 3))
    top, left = rng.integers(0, SIDE - 8, 2)
    pixels[top : top + 8, left : left + 8, kind] += 70
    return pixels.astype(np.uint8)


def main() -> None:
    """`--rows` rows of four clinics; each part points to the kind in seven rows of ten."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("data/clinics"))
    parser.add_argument("--rows", type=int, default=400)
    given = parser.parse_args()
    from PIL import Image

    rng = np.random.default_rng(0)
    (given.folder / "pictures").mkdir(parents=True, exist_ok=True)
    with (given.folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("kind", "clinic", "note", "picture", "age", "days"))
        for row in range(given.rows):
            kind = int(rng.integers(3))
            said, shown, counted = (kind if rng.random() < 0.7 else int(rng.integers(3)) for _ in range(3))
            note = f"patient says it is {rng.choice(WORDS[KINDS[said]])} since {rng.choice(('monday', 'friday'))}"
            name = f"pictures/{row}.png"
            Image.fromarray(picture(shown, rng)).save(given.folder / name)
            days = round(float(rng.normal(2 * counted, 1.5)), 1)
            table.writerow((KINDS[kind], f"clinic {row % 4}", note, name, int(rng.integers(18, 90)), days))
    print(f"{given.rows} rows in {given.folder / 'rows.csv'}")


if __name__ == "__main__":
    main()
