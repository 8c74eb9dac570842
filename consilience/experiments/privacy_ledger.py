"""The privacy ledger of a run, release by release: written before a round's model is released, never removed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from consilience.core.capabilities import capability
from consilience.core.protocols import ServerRule
from consilience.core.rounds import Round
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.experiments.noise_keys import NoiseKeys
from consilience.privacy import (
    NOTHING,
    History,
    Mechanism,
    SpendsPrivacy,
    Spent,
    epsilon_of,
    epsilon_so_far,
    noise_for,
)
from consilience.privacy.round_keys import fresh, name_of, release_of
from consilience.runs.checkpoint import Checkpoint
from consilience.runs.disk import explain, read_file, write_file
from consilience.runs.folder import RunFolder
from consilience.runs.row_log import RecordError, RowLog

FILE = "privacy.jsonl"
_KINDS: Mapping[str, type] = {
    **{"round": int, "noise": float, "rate": float},
    **{"private": bool, "key": str, "release": str},
}


def refuse_overspending(
    server: ServerRule, start: Tree, *, clients: int, rounds: int, after: History = NOTHING
) -> None:
    """Refuse, before anything starts, rounds that exceed the budget, and settings that cannot be private."""
    private = capability(server, SpendsPrivacy)
    if private is None:
        return
    server.init(start, clients)
    spending, budget, done = private.spending, private.epsilon, sum(after.values())
    cost = spending.epsilon(rounds, after)  # raises if it cannot be accounted for
    if budget is None or cost <= budget:
        return
    already = epsilon_of(after, spending.delta)
    if already > budget:
        raise Invalid(
            f"algorithm.epsilon = {budget:g}, but the {done} rounds released so far have spent epsilon = {already:.4g} "
            f"(delta = {spending.delta:g}), which nothing can take back: no further round fits"
        )
    with_noise = ""
    with contextlib.suppress(Invalid):  # where no noise would be enough
        enough = noise_for(
            budget, rounds=rounds, rate=spending.rate, delta=spending.delta, after=after, discrete=spending.discrete
        )
        with_noise = f", or algorithm.noise = {enough:.4g} for all {'that are left' if done else 'of them'}"
    raise Invalid(
        f"rounds = {done + rounds} would cost epsilon = {cost:.4g}, and algorithm.epsilon = {budget:g}: "
        f"{done + spending.rounds_within(budget, after)} rounds fit{with_noise}"
    )


def counted(rounds: Iterator[Round], server: ServerRule) -> Iterator[Round]:
    """The rounds, each with the budget spent so far among its notes, for a run without a folder."""
    private = capability(server, SpendsPrivacy)
    for round in rounds:
        if private is not None:
            spent = epsilon_so_far(private.spent_in(round.snapshot.server), private.spending.delta)
            round = replace(round, notes={**round.notes, "epsilon": spent, "private": private.noise_seed is None})
        yield round


class PrivacyLedger:
    """One row per release: round, noise, rate, whether the noise was secret, and names of its key and of itself.

    A round that is repeated after a crash, with the same key and the same replies, is the same release and costs
    nothing. Anything else is a new release, and is charged: with the same key, and so the same sampling, it is charged
    without amplification by sampling.
    """

    def __init__(self, folder: RunFolder, server: ServerRule, private: SpendsPrivacy, saved: Checkpoint | None) -> None:
        self._folder, self._server, self._private = folder, server, private
        self._log = RowLog(folder.path / FILE)
        self._rows = _checked_rows(folder, self._log, saved)
        # of all rows, updated row by row: later rounds must not take longer
        self._places = {row["release"]: place for place, row in reversed(list(enumerate(self._rows, 1)))}
        self._key_names = {row["key"] for row in self._rows}
        self._done = Counter(_mechanism(row) for row in self._rows)
        self._all_private = all(row["private"] for row in self._rows)
        self._last = max((row["round"] for row in self._rows), default=0)
        self.keys = NoiseKeys(folder.path / "keys")

    def begin(self, start: Tree, *, clients: int, first: int, last: int) -> None:
        """Refuse rounds `first` to `last` if they do not fit into the budget; erase the keys of those before.

        Rounds that were released already and whose keys still exist will be the same, and cost nothing.
        """
        again = {row["round"] for row in self._rows if row["key"] == self.keys.name(row["round"])}
        new = sum(round not in again for round in range(first, last + 1))
        refuse_overspending(self._server, start, clients=clients, rounds=new, after=self._done)
        self.keys.erase(first - 1)
        self._record()

    def accounted(self, round: Round) -> Round:
        """The round, once it is in the ledger, with what was spent up to it among its notes."""
        count = self._charged(round)
        done, private = self._done, self._all_private
        if count < len(self._rows):  # it was released before
            done = Counter(_mechanism(row) for row in self._rows[:count])
            private = all(row["private"] for row in self._rows[:count])
        spent = epsilon_so_far(done, self._private.spending.delta)
        return replace(round, notes={**round.notes, "epsilon": spent, "private": private})

    def round_key(self, round: int) -> bytes:
        """The key of a round; where clients add the noise, the round is charged now, before any of them is asked.

        Their noise is new each time: a repeated round is another release.
        """
        if not self._private.charged_first:
            return self.keys(round)
        key = fresh(round)
        self._charge(round, release_of(key), name_of(key))
        return key

    def position(self) -> tuple[int, str]:
        """The ledger's byte length and SHA-256, for the checkpoint."""
        return self._log.position()

    def _charged(self, round: Round) -> int:
        """The place of this release in the ledger, from 1; written now if it is a new one."""
        if self._private.charged_first:  # whether or not it was completed
            return len(self._rows)
        if round.notes["release"] not in self._places:
            self._charge(round.number, round.notes["release"], round.notes["key"])
        return self._places[round.notes["release"]]

    def _charge(self, round: int, release: str, key: str) -> None:
        """Record a release; refused if it exceeds the budget."""
        spending, budget = self._private.spending, self._private.epsilon
        rate = 1.0 if key in self._key_names else spending.rate
        row: dict[str, Any] = {"round": round, "noise": spending.noise, "rate": rate}
        row |= {"private": self._private.noise_seed is None, "key": key, "release": release}
        row |= {"discrete": True} if spending.discrete else {}
        done = self._done + Counter([_mechanism(row)])
        if budget is not None and epsilon_so_far(done, spending.delta) > budget:
            cost = epsilon_of(done, spending.delta)
            if cost > budget:
                raise Spent(
                    f"round {round} would bring epsilon to {cost:.4g}, above the budget of {budget:g} "
                    f"(delta = {spending.delta:g}), with all {len(self._rows)} releases before it: it is not released"
                )
        self._log.append(row)
        self._rows.append(row)
        self._places[release] = len(self._rows)
        self._key_names.add(key)
        self._done = done
        self._all_private = self._all_private and bool(row["private"])
        self._last = max(self._last, round)
        self._record()

    def _record(self) -> None:
        """The sum of the ledger, and where it ends, in `run.json`."""
        spending, rows = self._private.spending, self._rows
        self._folder.record(
            privacy={
                "epsilon": epsilon_so_far(self._done, spending.delta),
                "delta": spending.delta,
                "rounds": self._last,
                "releases": len(rows),
                "private": self._private.noise_seed is None and self._all_private,
                "noise": spending.noise,
                "rate": spending.rate,
                "neighbours": "one client with or without its rows",
                "ledger": self.position(),
            }
        )


def opened(folder: RunFolder, server: ServerRule, saved: Checkpoint | None) -> PrivacyLedger | None:
    """The ledger of a private run, checked against all other records of releases; None for other runs."""
    private = capability(server, SpendsPrivacy)
    if private is not None:
        return PrivacyLedger(folder, server, private, saved)
    if "privacy" in folder.facts() or os.path.lexists(folder.path / FILE):
        raise Invalid(
            f"{folder.path} is a private run, whose models all have noise: it cannot continue with "
            f"{type(server).__name__}, which adds none. Start a new run"
        )
    return None


def _checked_rows(folder: RunFolder, log: RowLog, saved: Checkpoint | None) -> list[dict[str, Any]]:
    """Every release so far; refuses a ledger that is damaged, or that lacks anything known to be released."""
    facts, metrics = folder.facts().get("privacy"), folder.rows().rows
    if not os.path.lexists(log.path):
        if facts is not None or metrics or saved is not None:
            _refuse(log, "is missing, though rounds of this run were released")
        _create(log)
        return []
    log.drop_torn_line()  # of a release that did not happen: rows are complete on disk before a model is released
    rows = log.read().rows
    for number, row in enumerate(rows, 1):
        if not _is_sound(row):
            _refuse(log, f"is damaged in line {number}")
    if rows and facts is None:
        _refuse(log, f"holds {len(rows)} releases, but the entry `privacy` is gone from run.json")
    positions = [] if facts is None else [("run.json", facts.get("ledger"))]
    positions += [] if saved is None else [(f"the checkpoint of round {saved.round}", saved.facts.get("privacy"))]
    for where, position in positions:
        if not _begins_with(log, position):
            _refuse(log, f"was changed or cut: it does not begin with the releases that {where} counts on")
    unknown = {row["round"] for row in metrics} - {row["round"] for row in rows}
    if unknown:
        _refuse(log, f"lacks round {min(unknown)}, which metrics.jsonl has")
    return rows


def _refuse(log: RowLog, reason: str) -> None:
    raise Invalid(
        f"{log.path} {reason}: what this private run has spent cannot be known, so it cannot continue, not even with "
        "--force. Put the file back as it was, or start a new run and add what both have spent"
    )


def _is_sound(row: Mapping[str, Any]) -> bool:
    if any(type(row.get(name)) is not kind for name, kind in _KINDS.items()):
        return False
    if type(row.get("discrete", False)) is not bool:
        return False
    return bool(row["round"] > 0 and 0 < row["noise"] < float("inf") and 0 < row["rate"] <= 1)


def _begins_with(log: RowLog, position: Any) -> bool:
    """Whether the ledger's first bytes have the digest that was once noted."""
    try:
        length, sha256 = position
        return hashlib.sha256(read_file(log.path)[:length]).hexdigest() == sha256
    except (TypeError, ValueError):
        return False


def _mechanism(row: Mapping[str, Any]) -> Mechanism:
    return Mechanism(row["noise"], row["rate"], row.get("discrete", False))


def _create(log: RowLog) -> None:
    try:
        write_file(log.path, [])
    except OSError as problem:
        raise RecordError(explain("create the privacy ledger", log.path, problem)) from problem
