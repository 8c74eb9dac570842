"""The ledger of a private run: nothing done to a run folder lowers what was spent, and no key outlives its use."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_private_runs import SEEDED, spent, start

from consilience.core.settings import Invalid
from consilience.experiments import live_run, runner
from consilience.experiments.noise_keys import NoiseKeys
from consilience.privacy import Spending, Spent, epsilon_of, history
from consilience.privacy.round_keys import name_of
from consilience.runs import checkpoint
from consilience.runs.facts import with_digest
from consilience.runs.folder import RunFolder
from consilience.runs.row_log import RecordError

pytestmark = pytest.mark.usefixtures("untraced")
dp_accounting = pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
WEAK = ("algorithm.noise=0.5", "algorithm.rate=1.0")
LEDGER = "privacy.jsonl"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]


def crash_at(calls: int, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
    """The process dies when it is about to call this for the nth time."""
    real, made = getattr(where, name), 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == calls:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(where, name, call)


@pytest.mark.parametrize(
    "change",
    [
        ["algorithm.noise=5.0"],
        ["algorithm.noise=5.0", "algorithm.rate=0.1"],
        ["algorithm.noise=50.0", "algorithm.delta=1e-3"],
        ["algorithm.noise=5.0", "algorithm.bound=0.1", "algorithm.lr=0.5"],
    ],
)
def test_force_does_not_lower_what_was_spent(change: list[str], tmp_path: Path) -> None:
    """Five rounds at noise 0.5, then a sixth with so much that a new account would hold next to nothing."""
    start(tmp_path, *WEAK, "rounds=5")
    folder, before = tmp_path / "private", history([(0.5, 1.0)] * 5)
    assert spent(folder)["epsilon"] == epsilon_of(before, 1e-5) > 20
    with pytest.raises(Invalid, match=r"algorithm\.epsilon = 3, but the 5 rounds released so far have spent epsilon"):
        runner.proceed(folder, [*change, "algorithm.epsilon=3.0", "rounds=6"], force=True)
    assert len(rows(folder)) == 5 and spent(folder)["epsilon"] == epsilon_of(before, 1e-5)
    last = runner.proceed(folder, [*change, "rounds=6"], force=True).history[-1]
    now = spent(folder)
    true = epsilon_of(history((row["noise"], row["rate"]) for row in rows(folder)), now["delta"])
    assert last["epsilon"] == now["epsilon"] == true > epsilon_of(before, now["delta"])
    assert now["releases"] == 6 and rows(folder)[:5] == [{**row, "noise": 0.5, "rate": 1.0} for row in rows(folder)[:5]]


def test_another_delta_is_asked_of_all_rounds(tmp_path: Path) -> None:
    start(tmp_path, "rounds=2")
    runner.proceed(tmp_path / "private", ["algorithm.delta=1e-7", "rounds=3"], force=True)
    assert spent(tmp_path / "private")["epsilon"] == Spending(noise=2.0, rate=0.5, delta=1e-7).epsilon(3)


def cut(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def cut_within_a_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def raise_noise(path: Path) -> None:
    path.write_text(path.read_text().replace('"noise":2.0', '"noise":9.0', 1))


def no_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"noise":2.0', '"noise":null', 1))


def no_json(path: Path) -> None:
    path.write_text(path.read_text().replace("{", "(", 1))


def forget(path: Path) -> None:
    facts = RunFolder.open(path.parent).facts()
    del facts["privacy"]
    (path.parent / "run.json").write_bytes(with_digest(facts))


def cut_and_forget(path: Path) -> None:
    cut(path)
    forget(path)


def empty_and_forget(path: Path) -> None:
    path.write_text("")
    forget(path)


def remove_and_forget(path: Path) -> None:
    path.unlink()
    forget(path)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The folders of a run with checkpoints, and of one that died before the first; tests work on copies."""
    saved, died = (tmp_path_factory.mktemp(name) for name in ("saved", "died"))
    start(saved)
    with pytest.MonkeyPatch.context() as patch:
        crash_at(4, patch, live_run.Run, "_record")
        with pytest.raises(KeyboardInterrupt):
            start(died, "checkpoint.every=9")
    return {True: saved / "private", False: died / "private"}


def test_the_runs_whose_ledgers_will_be_touched_can_go_on(untouched: dict[bool, Path], tmp_path: Path) -> None:
    for saved, folder in untouched.items():
        shutil.copytree(folder, tmp_path / str(saved))
        assert len(runner.proceed(tmp_path / str(saved), ["rounds=5"]).history) == 5


@pytest.mark.parametrize(
    "harm",
    [
        *(cut, cut_within_a_line, raise_noise, no_number, no_json, forget, cut_and_forget, empty_and_forget),
        *(Path.unlink, remove_and_forget),
    ],
)
@pytest.mark.parametrize("saved", [True, False])
def test_a_ledger_that_was_touched_is_refused(
    harm: Callable[[Path], None], saved: bool, untouched: dict[bool, Path], tmp_path: Path
) -> None:
    """With checkpoints, and before the first one."""
    folder = tmp_path / "private"
    shutil.copytree(untouched[saved], folder)
    harm(folder / LEDGER)
    left = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    for overrides, force in (([], False), (["algorithm.noise=9.0", "rounds=5"], True)):
        with pytest.raises((Invalid, RecordError), match=r"privacy\.jsonl.*(cannot be known|is damaged)"):
            runner.proceed(folder, overrides, force=force)
    for name in ("metrics.jsonl", "run.json"):
        assert (folder / name).read_bytes() == left[name]


def test_a_line_cut_off_by_a_crash_was_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_at(2, monkeypatch, live_run.Run, "_record")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    monkeypatch.undo()
    with (tmp_path / "private" / LEDGER).open("a") as file:
        file.write('{"round":3,"noi')
    assert len(runner.proceed(tmp_path / "private").history) == 4 == len(rows(tmp_path / "private"))


def test_a_private_run_does_not_go_on_without_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_at(2, monkeypatch, live_run.Run, "_record")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "checkpoint.every=9")
    monkeypatch.undo()
    plain = ["algorithm.name=fedavg", *(f"algorithm.{key}=" for key in ("bound", "noise", "rate", "delta", "bound_lr"))]
    with pytest.raises(Invalid, match="is a private run"):
        runner.proceed(tmp_path / "private", plain, force=True)


def test_a_round_done_again_with_fresh_noise_is_charged_again(tmp_path: Path) -> None:
    """The last checkpoint is damaged: the round before it is done again, and its key is gone."""
    start(tmp_path)
    folder = tmp_path / "private"
    newest = checkpoint.generations(folder / "checkpoints")[-1]
    (newest / "server.safetensors").write_bytes(b"")
    again = runner.proceed(folder)
    assert [row["round"] for row in rows(folder)] == [1, 2, 3, 4, 3, 4]
    assert len({row["release"] for row in rows(folder)}) == 6
    costs = [Spending(noise=2.0, rate=0.5).epsilon(releases) for releases in (1, 2, 5, 6)]
    assert [row["epsilon"] for row in again.history] == costs and spent(folder)["releases"] == 6


def test_rounds_charged_again_count_against_the_budget(tmp_path: Path) -> None:
    budget = Spending(noise=2.0, rate=0.5).epsilon(5)
    start(tmp_path, f"algorithm.epsilon={budget}")
    newest = checkpoint.generations(tmp_path / "private" / "checkpoints")[-1]
    (newest / "server.safetensors").write_bytes(b"")
    with pytest.raises(Invalid, match="rounds = 6 would cost"):
        runner.proceed(tmp_path / "private")
    assert len(rows(tmp_path / "private")) == 4


@pytest.mark.parametrize("budget", [None, 4])
def test_other_replies_under_a_stored_key_are_charged_without_sampling(
    budget: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coins are the same as in the release before: that one may have told who takes part."""
    crash_at(2, monkeypatch, live_run.Run, "_record")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "checkpoint.every=9")
    monkeypatch.undo()
    folder, changes = tmp_path / "private", ["algorithm.lr=0.3"]
    if budget is not None:
        changes += [f"algorithm.epsilon={Spending(noise=2.0, rate=0.5).epsilon(budget)}"]
        with pytest.raises(Spent, match=r"round 1 would bring epsilon to .* it is not released"):
            runner.proceed(folder, changes, force=True)
        return
    runner.proceed(folder, changes, force=True)
    assert [(row["round"], row["rate"]) for row in rows(folder)] == [
        *((1, 0.5), (2, 0.5)),
        *((1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5)),
    ]


def test_keys_are_for_their_owner_and_gone_once_their_round_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bytes] = []
    give = NoiseKeys.__call__
    monkeypatch.setattr(NoiseKeys, "__call__", lambda self, round: used.append(give(self, round)) or used[-1])
    crash_at(3, monkeypatch, live_run.Run, "_record")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    folder = tmp_path / "private"
    (file,) = (folder / "keys").iterdir()
    assert file.name == "round-00000003" and file.read_bytes() == used[2]
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE((folder / "keys").stat().st_mode) == 0o700
    runner.proceed(folder)
    assert used[3] == used[2] and len(set(used)) == 4, "a key was not repeated, or was used for two rounds"
    assert [row["key"] for row in rows(folder)] == [name_of(key) for key in dict.fromkeys(used)]
    assert not list((folder / "keys").iterdir())
    for left in folder.rglob("*"):
        content = left.read_bytes() if left.is_file() else b""
        assert not any(key in content or key.hex().encode() in content for key in used)


def test_a_seed_needs_no_key(tmp_path: Path) -> None:
    start(tmp_path, SEEDED, "rounds=1")
    assert not (tmp_path / "private" / "keys").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")
def test_keys_are_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_at(1, monkeypatch, live_run.Run, "_record")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    monkeypatch.undo()
    (tmp_path / "elsewhere").mkdir()
    for file in (tmp_path / "private" / "keys").iterdir():
        file.unlink()
    (tmp_path / "private" / "keys").rmdir()
    (tmp_path / "private" / "keys").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Invalid, match="not a link"):
        runner.proceed(tmp_path / "private")
    assert not any((tmp_path / "elsewhere").iterdir())
