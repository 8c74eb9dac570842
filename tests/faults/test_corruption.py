"""A run folder that is not as it was written is never used without a word."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sample_runs import real
from typer.testing import CliRunner

from consilience.cli import app
from consilience.runs import canonical
from consilience.runs.folder import RecordError, RunFolder
from consilience.runs.verification import problems

Change = Callable[[bytes, np.random.Generator], bytes]


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    changed[rng.integers(len(data))] ^= 1 << rng.integers(8)
    return bytes(changed)


def overwritten(data: bytes, rng: np.random.Generator) -> bytes:
    at, length = rng.integers(len(data)), rng.integers(1, 65)
    return data[:at] + rng.bytes(len(data[at : at + length])) + data[at + length :]


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data))]


def without_some(data: bytes, rng: np.random.Generator) -> bytes:
    at = rng.integers(len(data))
    return data[:at] + data[at + rng.integers(1, 65) :]


def without_a_line(data: bytes, rng: np.random.Generator) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.integers(len(lines))]
    return b"".join(lines)


def with_a_line_twice(data: bytes, rng: np.random.Generator) -> bytes:
    lines = data.splitlines(keepends=True)
    at = rng.integers(len(lines))
    return b"".join([*lines[:at], lines[at], *lines[at:]])


def with_other_digits(data: bytes, rng: np.random.Generator) -> bytes:
    digits = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    return data if not digits else replaced(data, digits[rng.integers(len(digits))], rng)


def replaced(data: bytes, at: int, rng: np.random.Generator) -> bytes:
    return data[:at] + b"%d" % rng.integers(10) + data[at + 1 :]


def grown(data: bytes, rng: np.random.Generator) -> bytes:
    return data + rng.bytes(int(rng.integers(1, 65)))


CHANGES: tuple[Change, ...] = (
    *(flipped, overwritten, cut, without_some, without_a_line, with_a_line_twice, with_other_digits, grown),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = real(tmp_path_factory.mktemp("whole") / "run", "checkpoint.every=1", "algorithm=scaffold")
    assert problems(RunFolder.open(folder)) == []
    return folder


def files(folder: Path) -> list[Path]:
    """All that a run writes, but for its lock, which holds nothing."""
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path for path in found if path.name != "lock"]


def noticed(folder: Path) -> bool:
    try:
        return bool(problems(RunFolder.open(folder)))
    except (RecordError, FileNotFoundError):
        return True


def silent(whole: Path, folder: Path, count: int, seed: int) -> list[str]:
    """Corruptions that nothing notices."""
    shutil.copytree(whole, folder)
    missed = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        name = files(whole)[number % len(files(whole))]
        change = CHANGES[rng.integers(len(CHANGES))]
        original = (whole / name).read_bytes()
        data = change(original, rng) if original else b"x"
        if data == original:
            continue
        (folder / name).write_bytes(data)
        if not noticed(folder):
            missed.append(f"{name}: {change.__name__} ({number})")
        (folder / name).write_bytes(original)
    return missed


def test_every_file_is_covered(whole: Path, tmp_path: Path) -> None:
    assert silent(whole, tmp_path / "run", count=160, seed=0) == []


@pytest.mark.slow
def test_ten_thousand_corruptions_are_noticed(whole: Path, tmp_path: Path) -> None:
    assert silent(whole, tmp_path / "run", count=10_000, seed=1) == []


def test_a_missing_file_is_noticed(whole: Path, tmp_path: Path) -> None:
    for name in files(whole):
        folder = tmp_path / name.as_posix().replace("/", "-")
        shutil.copytree(whole, folder)
        (folder / name).unlink()
        assert noticed(folder), name
    shutil.rmtree(folder / "checkpoints" / "round-00000003")
    assert "one is missing" in " ".join(problems(RunFolder.open(folder)))


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


def test_a_damaged_checkpoint_is_told_by_eval_show_and_resume(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    file = folder / "checkpoints" / "round-00000003" / "server.safetensors"
    file.write_bytes(flipped(file.read_bytes(), np.random.default_rng(0)))
    code, said = command("eval", folder)
    assert code == 0 and "after round 2" in said
    assert "warning: the model of round 2 is tested, because" in said and "round-00000003" in said
    code, said = command("show", folder)
    assert code == 0 and "warning:" in said and "server.safetensors" in said
    code, said = command("resume", folder, "--no-report")
    assert code == 0 and "fell back to round 2" in said
    assert problems(RunFolder.open(folder)) == []


@pytest.mark.parametrize("all_of_them", [True, False])
def test_checkpoints_of_another_run_are_refused(whole: Path, tmp_path: Path, all_of_them: bool) -> None:
    other = real(tmp_path / "other", "checkpoint.every=1", "algorithm=scaffold", "seed=7")
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    replaced = "checkpoints" if all_of_them else "checkpoints/round-00000003"
    shutil.rmtree(folder / replaced)
    shutil.copytree(other / replaced, folder / replaced)
    for arguments in (("eval", folder), ("export", folder, "--out", tmp_path / "x"), ("resume", folder, "rounds=4")):
        code, said = command(*arguments)
        assert code not in (0, 1) and "round 3 is that of another run" in said, (arguments, said)
    code, said = command("show", folder)
    assert code == 0 and "warning:" in said and "does not hold what the checkpoint of round 3 counted on" in said


def test_an_eval_says_that_a_log_is_not_the_one_of_the_checkpoint(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([lines[1], lines[0], lines[2]]))
    code, said = command("eval", folder)
    assert code == 0 and "after round 3" in said and "warning:" in said and "metrics.jsonl" in said


@pytest.mark.parametrize("name", ["clients.jsonl", "metrics.jsonl", "timing.jsonl", "partition.npz", "config.toml"])
def test_a_resume_refuses_damage(whole: Path, tmp_path: Path, name: str) -> None:
    for number in range(8):
        folder = tmp_path / f"{number}"
        shutil.copytree(whole, folder)
        rng = np.random.default_rng(number)
        file = folder / name
        file.write_bytes(flipped(file.read_bytes(), rng))
        code, said = command("resume", folder, "rounds=4", "--no-report")
        assert code not in (0, 1) and name in said, (number, said)


def test_a_folder_of_the_first_format_is_read(whole: Path, tmp_path: Path) -> None:
    folder = RunFolder.open(shutil.copytree(whole, tmp_path / "run"))
    rows, facts = {log.path: log.read().rows for log in (folder.metrics, folder.timing, folder.clients)}, folder.facts()
    facts = {key: value for key, value in facts.items() if key != "files"} | {"format": 1}
    (folder.path / "run.json").write_bytes(canonical.encode(facts, pretty=True))
    for path, each in rows.items():
        path.write_bytes(b"".join(canonical.encode(row) + b"\n" for row in each))
    old = RunFolder.open(folder.path)
    assert old.version == 1 and old.rows().rows == rows[folder.metrics.path]
    old.record(status="interrupted")
    assert RunFolder.open(folder.path).facts()["status"] == "interrupted"
