"""The licences of the pinned packages and of all that they need, against a list of those that are allowed; no network.

`python tools/licences.py` prints a table; exit code 1 if a licence is missing or not on the list.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
ALLOWED = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC"),
    *("MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib", "BSD", "Public-Domain"),
    "Apache-2.0 WITH LLVM-exception",
}
SPELLED = {  # as older packages say it
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Public Domain": "Public-Domain",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}
LOOKED_AT = {  # by a person: what the metadata does not say, and why it is all right
    "axe-playwright-python": "MIT in its licence file, and MPL-2.0 for the axe-core that it holds; only tests use it",
    "byzfl": "MIT in its repository; an oracle of the tests, which nothing else uses",
    "docutils": "public domain and BSD; the GPL is that of an Emacs mode, which only makes the documentation",
}


def licences(found: metadata.PackageMetadata) -> list[str]:
    """What a package says: its licence expression, or its classifiers, or its licence's first line."""
    said = found.get_all("License-Expression") or [
        line.rpartition(" :: ")[2] for line in found.get_all("Classifier", []) if line.startswith("License :: ")
    ]
    said = [one for one in said if one != "OSI Approved"]
    if not said:
        said = [text.strip().splitlines()[0] for text in found.get_all("License", []) if text.strip()]
    return [SPELLED.get(one, one) for one in said]


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression allows what we do: one of its alternatives, and of that all parts."""
    ways = expression.replace("(", "").replace(")", "").split(" OR ")
    return any(all(part.strip() in ALLOWED for part in way.split(" AND ")) for way in ways)


def why_not(name: str, said: Iterable[str]) -> str:
    """Why a package cannot be used; "" if it can."""
    said = list(said)
    if name in LOOKED_AT:
        return ""
    if not said:
        return "it declares no licence"
    refused = [one for one in said if not is_allowed(one)]
    return f"{', '.join(refused)} is not on the list" if refused else ""


def pinned(text: str) -> list[str]:
    """The packages that a constraints file names."""
    return [canonicalize_name(found[1]) for found in re.finditer(r"(?m)^([A-Za-z0-9._-]+)==", text)]


def closure(names: Iterable[str]) -> Iterator[metadata.Distribution]:
    """These packages and all that they need, as they are installed; each once, by name."""
    waiting, found = sorted(names), dict[str, metadata.Distribution]()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system or another extra
        for line in found[name].requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(need.name))
    yield from (found[name] for name in sorted(found))


def main() -> int:
    """Print the table."""
    wrong = []
    for package in closure(pinned(PINS.read_text(encoding="utf-8"))):
        name, said = canonicalize_name(package.metadata["Name"]), licences(package.metadata)
        why = why_not(name, said)
        print(f"{name:32} {package.version:14} {LOOKED_AT.get(name) or ', '.join(said)}")
        wrong += [f"{name}: {why}"] if why else []
    for line in wrong:
        print(f"NOT ALLOWED {line}: remove it, or add it to {Path(__file__).name} with the reason")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
