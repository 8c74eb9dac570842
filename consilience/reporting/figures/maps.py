"""Maps of clients: positions by their updates, and transfer between them; these reveal something about their data."""

from __future__ import annotations

import base64
import binascii
from typing import Any, NamedTuple

import numpy as np

from consilience.reporting.charts import CLIENT, Axis, Colouring, Figure, Heat, Points, Scale
from consilience.reporting.figures.by_client import clients
from consilience.reporting.figures.similarity import MEAN, MOST_FRAMES, mean_over, spread_out
from consilience.reporting.runs import RunData
from consilience.reporting.static import evenly
from consilience.runs.metric_table import main_of

_MEMORY = 0.5  # weight of a client's direction in the round before: a single round is noisy
_CLEAR = 0.2  # silhouette score from which groups are shown
_MOST_GROUPS = 8
_DIMENSIONS = 8  # dimensions in which groups are searched
_WARNING = "The figure discloses which clients have similar data: think before you share it."


class Updates(NamedTuple):
    """The record of clients' updates in a round."""

    ids: np.ndarray  # [m]
    lengths: np.ndarray  # [m]
    cosine: np.ndarray  # [m, m]
    projections: np.ndarray  # [m, d], of length about 1


def updates(run: RunData) -> dict[int, Updates]:
    """The recorded updates by round; damaged rows are left out."""
    found = {}
    for number, row in run.clients.items():
        if number <= len(run.rows) and isinstance(row.get("updates"), dict):
            try:
                found[number] = _read(row["updates"], run.count)
            except (KeyError, TypeError, ValueError, binascii.Error):
                continue
    return dict(sorted(found.items()))


def drawn(run: RunData) -> list[Figure]:
    """The map and the matrix of transfer, where updates were recorded."""
    found = updates(run)
    if not found:
        return []
    pictures = [_map(run, found), _transfer(run, found)]
    return [picture for picture in pictures if picture is not None]


def placed(run: RunData, found: dict[int, Updates]) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """By round [K, 2]: classical scaling of the distances between directions, turned to fit the round before.

    A client's direction is a running mean over the rounds it took part in, NaN before the first; the last ones [K, d]
    come second.
    """
    direction, before = np.full((run.count, next(iter(found.values())).projections.shape[1]), np.nan), None
    places: dict[int, np.ndarray] = {}
    for number, now in found.items():
        old = np.nan_to_num(direction[now.ids])
        direction[now.ids] = _unit(_MEMORY * old + (1 - _MEMORY) * now.projections)
        known = np.flatnonzero(np.isfinite(direction[:, 0]))
        at = np.full((run.count, 2), np.nan)
        if len(known) > 2:
            at[known] = _scaled(direction[known])
            if before is not None:
                at[known] = _turned(at[known], before[known])
            places[number] = before = at
    return places, direction


def transferred(now: Updates) -> np.ndarray:
    """[m, m] <u_i, u_j> / |u_j|^2: the projection of i's update on j's, relative to j's; NaN on the diagonal."""
    ratio = np.divide(now.lengths[:, None], now.lengths[None, :], where=now.lengths[None, :] > 0, out=_nothing(now))
    found = now.cosine * ratio
    np.fill_diagonal(found, np.nan)
    return found


def groups_of(run: RunData, directions: np.ndarray) -> list[str]:
    """The clusters that the method made, or groups of directions if they are clear; '-' for clients without one."""
    recorded: dict[int, int] = {}
    for row, it in ((row, run.clients.get(row["round"], {})) for row in run.rows):
        ids, labels = row.get("cohort") or [], it.get("cluster")
        if isinstance(labels, list) and len(labels) == len(ids):
            recorded |= dict(zip(ids, labels))
    if recorded:
        return [f"cluster {recorded[k]}" if k in recorded else "-" for k in range(run.count)]
    known = np.flatnonzero(np.isfinite(directions[:, 0]))
    labels = _clear_groups(_scaled(directions[known], _DIMENSIONS))
    named = dict(zip(known.tolist(), labels))
    return [f"group {named[k] + 1}" if k in named else "-" for k in range(run.count)]


def _map(run: RunData, found: dict[int, Updates]) -> Figure | None:
    places, directions = placed(run, found)
    if not places:
        return None
    numbers = [list(places)[i] for i in evenly(len(places), MOST_FRAMES)]
    last = places[numbers[-1]]
    shown = np.flatnonzero(np.isfinite(last[:, 0]))
    names = [run.client_names()[k] for k in shown]
    frames = tuple((str(number), places[number][shown]) for number in numbers)
    by_group = groups_of(run, directions)
    told = len(set(by_group) - {"-"})
    grouped = [Colouring("group", [by_group[k] for k in shown])]
    others = _colourings(run, shown, numbers)
    colourings = [*grouped, *others] if told > 1 or not others else others  # a single group needs no colours
    axes = ("first direction of difference", "second direction of difference")
    chart = Points(names=names, frames=frames, colourings=colourings, axes=axes)
    clear = f"{told} groups can be told apart." if told > 1 else "No clear groups were found."
    some = "" if len(shown) == run.count else f" {len(shown)} of {run.count} clients were recorded."
    caption = (
        "Each point is one client. Clients whose updates point the same way lie close together, those that pull the "
        "model apart lie far from each other; in the interactive figure a slider shows how that changes over rounds."
        f"{some} {clear} One cloud "
        "around the middle means that clients differ by chance only, which suits one model for all; separate clouds "
        f"suggest clusters or personal models. {_WARNING}"
    )
    return Figure(name="map", title="Map of clients", caption=caption, chart=chart)


def _transfer(run: RunData, found: dict[int, Updates]) -> Figure | None:
    known = np.unique(np.concatenate([now.ids for now in found.values()]))
    numbers = list(found)
    whole = {number: spread_out(known, now.ids, transferred(now)) for number, now in found.items()}
    mean = mean_over(list(whole.values()))
    if not np.isfinite(mean).any():
        return None
    chosen = [numbers[i] for i in evenly(len(numbers), MOST_FRAMES if len(known) <= 64 else 8)]
    frames = (*((str(number), whole[number]) for number in chosen), (MEAN, mean))
    limit = float(np.clip(np.nanquantile(np.abs(mean), 0.99) * 1.2, 0.1, 2.0))
    names = run.client_names()
    axis = clients(names) if len(known) == run.count else Axis("client", [names[k] for k in known], of=CLIENT)
    chart = Heat(
        values=mean,
        down=axis._replace(title="from client"),
        across=axis._replace(title="to client"),
        scale=Scale("share of the client's own step", low=-limit, high=limit, diverging=True),
        frames=frames,
        summary=True,
    )
    caption = (
        "What the update of the client in a row does for the client in a column, to first order: the part of it that "
        "lies along the column's own update, as a share of that update. Blue helps (1 would be as much as its own "
        "training), white does nothing, red undoes what the client has learned. A good federation is mostly blue; a "
        "red row is a client whose data work against the others. Estimated from random projections (error about 0.03 "
        f"in a round, less in the mean); empty: never in the same round. {_WARNING}"
    )
    return Figure(name="transfer", title="Who helps whom", caption=caption, chart=chart)


def _colourings(run: RunData, shown: np.ndarray, numbers: list[int]) -> list[Colouring]:
    """Size, most frequent class, and the main metric over rounds, where the record has them."""
    found = []
    rows, counts = run.federation.get("train_rows"), run.federation.get("class_counts")
    if isinstance(rows, list) and len(rows) == run.count:
        found.append(Colouring("training rows", values=[np.array(rows)[shown]]))
    if isinstance(counts, list) and len(counts) == run.count and 1 < len(counts[0]) <= 20:
        labels = [str(label) for label in run.federation.get("labels") or range(len(counts[0]))]
        most = np.array(counts).argmax(1)
        found.append(Colouring("most frequent class", [labels[most[k]] if sum(counts[k]) else "-" for k in shown]))
    main = main_of(run.metrics)
    for kind, title in ((main.key, main.title), (f"personal_{main.key}", f"personal {main.title}")):
        tested = {n: row[kind] for n, row in run.clients.items() if isinstance(row.get(kind), list)}
        tested = {n: values for n, values in sorted(tested.items()) if len(values) == run.count}
        if tested:
            until = [max((n for n in tested if n <= number), default=min(tested)) for number in numbers]
            found.append(Colouring(title, values=[_floats(tested[n])[shown] for n in until]))
    return found


def _read(row: dict[str, Any], count: int) -> Updates:
    ids, lengths = np.array(row["clients"], dtype=np.int64), np.array(row["lengths"], dtype=np.float64)
    m = len(ids)
    below, flat = _unpacked(row["cosines"]), _unpacked(row["projections"])
    if m < 1 or len(lengths) != m or ids.min() < 0 or ids.max() >= count or len(set(ids.tolist())) != m:
        raise ValueError("not a row of this run")
    cosine = np.eye(m)
    cosine[np.tril_indices(m, -1)] = below
    return Updates(ids, lengths, np.tril(cosine) + np.tril(cosine, -1).T, flat.reshape(m, -1))


def _unpacked(text: str) -> np.ndarray:
    found = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f2").astype(np.float64)
    if not np.isfinite(found).all():
        raise ValueError("numbers that are not finite")
    return found


def _scaled(directions: np.ndarray, dimensions: int = 2) -> np.ndarray:
    """[n, 2] classical multidimensional scaling: the centred rows on their main directions."""
    centred = directions - directions.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    at = left[:, :dimensions] * sizes[:dimensions]
    signs = np.sign(at[np.abs(at).argmax(0), range(at.shape[1])])  # signs are arbitrary in a decomposition
    at = at * np.where(signs == 0, 1, signs)
    return np.pad(at, ((0, 0), (0, dimensions - at.shape[1])))


def _turned(at: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Rotated or mirrored onto where the same clients were (orthogonal Procrustes)."""
    both = np.isfinite(before[:, 0])
    if both.sum() < 2:
        return at
    left, _, right = np.linalg.svd(at[both].T @ before[both])
    return at @ (left @ right)


def _clear_groups(places: np.ndarray) -> np.ndarray:
    """[n] numbers of groups; all 0 where none stand out."""
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import silhouette_score

    best, chosen = _CLEAR, np.zeros(len(places), dtype=np.int64)
    for count in range(2, min(_MOST_GROUPS, len(places) - 1) + 1):
        labels = AgglomerativeClustering(n_clusters=count).fit_predict(places)
        score = float(silhouette_score(places, labels)) if len(set(labels)) > 1 else 0.0
        if score > best + 1e-9:
            best, chosen = score, labels
    first = {label: n for n, label in enumerate(dict.fromkeys(chosen.tolist()))}  # numbered by their first client
    return np.array([first[label] for label in chosen.tolist()])


def _unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)


def _nothing(now: Updates) -> np.ndarray:
    return np.zeros((len(now.ids), len(now.ids)))


def _floats(values: list[Any]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
