"""Hostile names become no paths and no forged log lines (FAULTS 52, goal G22)."""

from __future__ import annotations

import io
import logging
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.runs.checkpoint import save
from consilience.runs.folder import RunFolder
from consilience.runs.names import LONGEST, plain, safe_name

TRAVERSAL = [
    *(
        "..",
        ".",
        "../",
        "./",
        "../x",
        "../../etc/passwd",
        "a/../../b",
        "a/b",
        "a/",
        "/",
        "//",
        "/etc/passwd",
        "~",
        "~root",
    ),
    *(
        "..\\",
        "..\\..\\windows",
        "a\\b",
        "\\",
        "\\\\server\\share",
        "C:",
        "C:\\x",
        "c:x",
        "file:///etc/passwd",
        "a:stream",
    ),
    *(
        "....//",
        "..;/",
        "%2e%2e%2f",
        "..%2f",
        "%2e%2e/",
        "..%5c",
        "%00",
        "..%c0%af",
        "..%252f",
        "/proc/self/mem",
        "/dev/null",
    ),
    *(
        ".hidden",
        "...",
        ".git",
        "-rf",
        "--help",
        "-",
        "--",
        "run.",
        "run..",
        "x/.",
        "$HOME",
        "${PATH}",
        "`id`",
        "$(id)",
    ),
]
DEVICES = [
    *("CON", "con", "Con", "PRN", "AUX", "NUL", "nul", "NUL.txt", "con.log", "aux.tar.gz", "CON.", "lpt1.x", "CLOCK$"),
    *(f"{port}{n}" for port in ("COM", "lpt") for n in range(10)),
    *("COM\u00b9", "LPT\u00b2", "CONIN$", "CONOUT$"),
]
CONTROLS = [
    *(f"run{chr(code)}x" for code in (*range(32), 127, 128, 133, 155, 159, 160)),
    *(
        "\n",
        "x\n",
        "\nx",
        "ok\nERROR forged line",
        "ok\r\nERROR forged",
        "x\rround 1",
        "a\x0bb",
        "a\x0cb",
        "\x1b[2Jgone",
    ),
    *(
        "\x1b[31mred",
        "\x1b]0;title\x07",
        "\x08\x08\x08rewritten",
        "tab\tname",
        "nul\x00.txt",
        "\x00",
        "a\u2028b",
        "a\u2029b",
    ),
]
LOOKALIKES = [
    *(
        "\u0430dmin",
        "r\u0443n",
        "\uff52\uff55\uff4e",
        "\u2024\u2024\u2215",
        "\u2215etc",
        "a\u2044b",
        "\uff0e\uff0e\uff0fx",
    ),
    *(
        "run\u202egpj",
        "a\u200bb",
        "a\u200db",
        "a\u2060b",
        "\ufeffrun",
        "a\u00adb",
        "caf\u00e9",
        "cafe\u0301",
        "\u212aelvin",
    ),
    *(
        "\u0131d",
        "\u017fecret",
        "\u2160",
        "\u0661\u0662",
        "\U0001d5d4dmin",
        "\U0001f600",
        "run\u3000x",
        "na\u00efve",
        "\u00df",
    ),
    *(
        "a\u2010b",
        "a\u2013b",
        "\u2025",
        "\u3002",
        "\ud800",
        "a\udfff",
        "\U000e0041tag",
        "Z\u0351\u036b\u0343",
        "\u0627\u0644",
    ),
]
AWKWARD = [
    *(
        "",
        " ",
        "  ",
        " x",
        "x ",
        "a b",
        "x" * 65,
        "x" * 10_000,
        "../" * 3_000,
        "\n" * 10_000,
        "a*b",
        "a?b",
        "a|b",
        "a<b",
        "a>b",
    ),
    *(
        'a"b',
        "a'b",
        "a;b",
        "a&b",
        "a#b",
        "a%b",
        "a@b",
        "a!b",
        "a=b",
        "a,b",
        "a+b",
        "a(b)",
        "a[b]",
        "a{b}",
        "a^b",
        "\\n",
    ),
    *("[red]x[/red]", "<script>alert(1)</script>", "'; DROP TABLE runs;--", "{0}", "%s%n", "{{7*7}}", "\\x41", "x\\"),
]
HOSTILE = list(dict.fromkeys(TRAVERSAL + DEVICES + CONTROLS + LOOKALIKES + AWKWARD))
# In company, what is hostile alone stays hostile, except what is only so at one end or as the whole name.
WRAPPED = [
    f"{before}{text}{after}"
    for text in TRAVERSAL + CONTROLS + LOOKALIKES
    for before, after in (("run-", ""), ("", "-7"), ("client_", ".json"))
    if any(not (c.isascii() and (c.isalnum() or c in "._-")) for c in text)
]
CORPUS = list(dict.fromkeys(HOSTILE + WRAPPED))


def test_the_corpus_is_large() -> None:
    assert len(HOSTILE) >= 200 and len(CORPUS) >= 500


def test_every_hostile_name_is_refused_on_one_printable_line() -> None:
    for text in CORPUS:
        with pytest.raises(Invalid) as refusal:
            safe_name(text, "client name")
        message = str(refusal.value)
        assert message.startswith("client name = ") and message.isprintable() and len(message) < 500, ascii(text)


@pytest.mark.parametrize("value", [None, 3, 3.5, True, b"run", ["run"], Path("run")])
def test_what_is_not_text_is_refused(value: Any) -> None:
    with pytest.raises(Invalid, match="not text"):
        safe_name(value, "run name")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "a",
            "7",
            "_",
            "run",
            "simprox-mnist_2024.01",
            "A.B-c_d",
            "x" * LONGEST,
            "0",
            "_-.x",
            "a..b",
            "console",
            "nullable",
        ),
        *("com10", "comma", "lpt", "aux-1", "con_x", "x.con"),
    ],
)
def test_ordinary_names_pass_unchanged(name: str) -> None:
    assert safe_name(name, "run name") == name


DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


@given(st.text(max_size=80) | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,70}", fullmatch=True))
def test_whatever_passes_is_one_harmless_path_component(text: str) -> None:
    try:
        name = safe_name(text, "run name")
    except Invalid:
        device = text.split(".")[0].lower() in DEVICES
        assert not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?", text) or device
        return
    assert name == text and name.isascii() and os.path.basename(name) == name and name not in (".", "..")
    assert os.path.normpath(os.path.join("root", name)) == os.path.join("root", name)


def test_no_hostile_run_or_tree_name_touches_the_disk(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "runs"
    root.mkdir(parents=True)
    for text in CORPUS:
        with pytest.raises(Invalid):
            RunFolder.create(root, text, "rounds = 1", {})
        with pytest.raises(Invalid):
            save(root / "checkpoints", 0, {text: {}})
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["deep", "deep/runs"]


def test_no_hostile_text_forges_a_log_line() -> None:
    stream = io.StringIO()
    log = logging.Logger("names")
    log.addHandler(logging.StreamHandler(stream))
    for text in CORPUS:
        log.warning("client %s dropped", plain(text))
    lines = stream.getvalue().splitlines()  # also splits at separators that only some readers honour
    assert len(lines) == len(CORPUS)
    assert all(line.startswith("client ") and line.endswith(" dropped") for line in lines)
    stream.getvalue().encode("utf-8")  # no lone surrogate is left


@given(st.text(), st.integers(1, 50))
def test_plain_text_is_printable_short_and_keeps_what_is_harmless(text: str, most: int) -> None:
    shown = plain(text, most=most)
    assert shown.isprintable() and len(shown) <= most + 40
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    if text.isprintable() and "\\" not in text and len(text) <= most:
        assert shown == text


@given(st.text(max_size=30), st.text(max_size=30))
def test_different_texts_stay_different(a: str, b: str) -> None:
    assert (plain(a, most=1000) == plain(b, most=1000)) == (a == b)


def test_long_texts_are_cut_with_their_length() -> None:
    assert plain("x" * 10_000, most=20) == "x" * 20 + "... (10000 characters)"
    assert plain("a\nb\x1b\u202e\\") == "a\\nb\\x1b\\u202e\\\\"
