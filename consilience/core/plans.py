"""Batch plans: which rows a client trains on at each step, drawn from (seed, round, client)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.federation import Rows
from consilience.core.settings import Count, Invalid, Positive, check
from consilience.core.tree import leaves, map_leaves

Split = Literal["train", "test", "validation"]
READ_BYTES = 2**20  # that are read at once: half of what a core's second cache holds


@dataclass(frozen=True, kw_only=True)
class Work:
    """A client's local work in a round: epochs over its rows, and rows per step (None: all rows)."""

    epochs: Positive = 1  # 0.5 is half of the rows
    batch_size: Count | None = 32
    shuffle: bool = True  # anew in every epoch
    rows: Split = "train"
    trains: bool = True  # False: no training, no memory update, and environment faults do not apply
    reliable: bool = field(default=False, repr=False)  # True: normal work, but every reply arrives
    # Each slot draws one of the client's classes, uniformly or by these weights (of class 0, 1 ...), then one row of
    # that class. None: every row once per epoch.
    class_shares: Literal["equal"] | tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.class_shares is not None and not self.shuffle:
            raise Invalid("Work.class_shares draws rows at random: it is incompatible with shuffle = False")
        if isinstance(self.class_shares, tuple) and len(set(self.class_shares)) < 2:
            raise Invalid(f"Work.class_shares = {list(self.class_shares)}: equal weights are written 'equal'")

    def check_targets(self, y: Tensor) -> None:
        """Refuse targets that are not class numbers, or that have no weight."""
        if self.class_shares is None:
            return
        if y.dim() != 1 or y.is_floating_point():
            raise Invalid(
                f"class_shares = {self.class_shares!r} needs one class number a row, and targets are "
                f"{tuple(y.shape[1:]) or 'single'} values of {y.dtype}: leave it out"
            )
        if isinstance(self.class_shares, tuple) and y.numel() and int(y.max()) >= len(self.class_shares):
            raise Invalid(
                f"class_shares has {len(self.class_shares)} weights, but there is a class number {int(y.max())}: "
                "give one for every class, from 0 on"
            )

    def steps_per_epoch(self, sizes: np.ndarray) -> np.ndarray:
        """[m] batches in one pass, the last one possibly short; 0 for an empty client."""
        if self.batch_size is None:
            return (sizes > 0).astype(np.int64)
        return -(-sizes // self.batch_size)


class Batch(NamedTuple):
    """One step's input for one client; `mask` is None if there is no padding."""

    x: Any  # [B, ...]
    y: Tensor  # [B, ...]
    mask: Tensor | None  # [B] 1.0 where the slot holds a row, 0.0 where it is padding
    key: Tensor  # int64 scalar: seeds dropout and augmentation
    first: Tensor  # bool scalar: the first step of a local epoch
    weight: Tensor | None = None  # [B] weight of each row in the loss; None: 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """The steps of a group of clients, most steps first; `rows` are indices into the store."""

    rows: Tensor  # [S, k, B] int64
    live: np.ndarray  # [S, k] slots in use, on the host: 0 where the client has finished
    steps: np.ndarray  # [k], descending
    keys: Tensor  # [S, k] int64
    first: Tensor  # [S, k] bool

    @property
    def width(self) -> int:
        """Slots per step."""
        return self.rows.shape[-1]

    def active(self, step: int) -> int:
        """How many clients (the first ones) still work at this step."""
        return int((self.steps > step).sum())

    def full(self, step: int, clients: int) -> bool:
        """Whether no slot of the first `clients` clients is padding at this step."""
        return bool((self.live[step, :clients] == self.width).all())

    def mask(self, step: int, clients: int, dtype: torch.dtype) -> Tensor:
        """[clients, B] which slots hold a row."""
        live = torch.from_numpy(self.live[step, :clients]).to(self.rows.device)
        return (torch.arange(self.width, device=self.rows.device) < live.unsqueeze(-1)).to(dtype)

    def head(self, clients: int, most: int | None = None) -> Plan:
        """The plan of the first clients, for a limited number of steps."""
        steps = self.steps[:clients] if most is None else np.minimum(self.steps[:clients], most)
        part = (slice(0, int(steps.max(initial=0))), slice(0, clients))
        return Plan(
            rows=self.rows[part],
            live=self.live[part] * (np.arange(part[0].stop)[:, None] < steps),
            steps=steps,
            keys=self.keys[part],
            first=self.first[part],
        )

    def tail(self, step: int, clients: int) -> Plan:
        """The remaining plan of the first `clients` clients from this step on."""
        part = (slice(step, None), slice(0, clients))
        return Plan(
            rows=self.rows[part],
            live=self.live[part],
            steps=np.maximum(self.steps[:clients] - step, 0),
            keys=self.keys[part],
            first=self.first[part],
        )

    def of(self, client: int) -> Plan:
        """One client's plan, without the client axis."""
        part = (slice(0, int(self.steps[client])), client)
        return Plan(
            rows=self.rows[part],
            live=self.live[part],
            steps=self.steps[client : client + 1],
            keys=self.keys[part],
            first=self.first[part],
        )

    def group(self, step: int, clients: int, store: Rows, dtype: torch.dtype) -> Batch:
        """The stacked batch of the first `clients` clients."""
        index = self.rows[step, :clients]
        mask = None if self.full(step, clients) else self.mask(step, clients, dtype)
        return batch_of(store, index, mask, self.keys[step, :clients], self.first[step, :clients])

    def batches(self, client: int, store: Rows, dtype: torch.dtype, *, cut: bool) -> Iterator[Batch]:
        """One client's batches in order, cut to their rows or padded; the rows of several steps are read at once."""
        row = sum(leaf.element_size() * leaf[:1].numel() for leaf in leaves(store.x))
        width, steps = self.width, int(self.steps[client])
        at_once = max(1, READ_BYTES // max(1, row * width))
        for begin in range(0, steps, at_once):
            part = slice(begin, min(begin + at_once, steps))
            read = batch_of(store, self.rows[part, client], None, self.keys[part, client], self.first[part, client])
            x = map_leaves(lambda leaf: leaf.unbind(0), read.x)
            weights = None if read.weight is None else read.weight.unbind(0)
            for step, (y, key, first) in enumerate(zip(read.y.unbind(0), read.key.unbind(0), read.first.unbind(0))):
                mine = map_leaves(lambda parts: parts[step], x)  # noqa: B023
                batch = Batch(mine, y, None, key, first, None if weights is None else weights[step])
                live = int(self.live[begin + step, client])
                if live < width:
                    batch = _head(batch, live) if cut else batch._replace(mask=self._mask(live, dtype))
                yield batch

    def padded(self, step: int, client: int, store: Rows, dtype: torch.dtype) -> Batch:
        """One client's batch padded to full width, with a mask if it is short, so that steps have only two shapes."""
        live, index = int(self.live[step, client]), self.rows[step, client]
        mask = None
        if live < self.width:
            mask = self._mask(live, dtype)
        return batch_of(store, index, mask, self.keys[step, client], self.first[step, client])

    def _mask(self, live: int, dtype: torch.dtype) -> Tensor:
        return (torch.arange(self.width, device=self.rows.device) < live).to(dtype)

    def single(self, step: int, client: int, store: Rows) -> Batch:
        """One client's batch without padding."""
        index = self.rows[step, client, : int(self.live[step, client])]
        return batch_of(store, index, None, self.keys[step, client], self.first[step, client])


def batch_of(store: Rows, index: Tensor, mask: Tensor | None, key: Tensor, first: Tensor) -> Batch:
    """The rows of an index of any shape as a batch."""
    weight = None if store.weight is None else gather(store.weight, index)
    return Batch(store.features(gather(store.x, index)), gather(store.y, index), mask, key, first, weight)


def _head(batch: Batch, live: int) -> Batch:
    """The first rows of a batch."""
    x, weight = map_leaves(lambda leaf: leaf[:live], batch.x), batch.weight
    return batch._replace(x=x, y=batch.y[:live], weight=None if weight is None else weight[:live])


def gather(rows: Any, index: Tensor) -> Any:
    """Rows of a tensor, or of every tensor in a tree, by an index of any shape."""

    def pick(leaf: Tensor) -> Tensor:  # index_select copies whole rows, several times faster than leaf[index] on a CPU
        return leaf.index_select(0, index.reshape(-1)).reshape(*index.shape, *leaf.shape[1:])

    return map_leaves(pick, rows)


def draw(
    work: Work,
    store: Rows,
    ids: np.ndarray,
    steps: np.ndarray,
    *,
    seed: int,
    round: int,
    where: np.ndarray | None = None,
) -> Plan:
    """Plan `steps[i]` batches for client `ids[i]`; steps must descend, and the work must fit (`check_targets`).

    Each epoch is a new permutation of its rows, or as many draws by class (`work.class_shares`).

    `where`: the clients' positions in the store, if it holds only part of the federation.
    """
    device = store.y.device
    places = torch.from_numpy(ids if where is None else where)
    sizes = store.sizes[places].numpy()
    per_epoch = np.maximum(work.steps_per_epoch(sizes), 1)
    longest, count = max(1, int(sizes.max(initial=1))), int(steps.max(initial=0))
    width = min(longest, work.batch_size or longest)
    epochs = max(1, int((-(-steps // per_epoch)).max(initial=1)))
    starts = store.starts[places].numpy()
    of_client = rng.fold(rng.key(seed, "plan", round), ids)
    of_epoch = rng.fold(of_client[:, None], np.arange(epochs))  # [k, E]
    # a few numbers per client: computed on the host and sent in one copy, which saves dozens of kernel launches
    table = np.stack([of_client, sizes, per_epoch, starts, *of_epoch.T])
    keys, size, passes, start, *epoch_keys = torch.from_numpy(table).to(device, non_blocking=True)  # [4 + E, k]
    if work.shuffle:
        order = rng.permutations(torch.stack(epoch_keys, -1), size.unsqueeze(-1), longest)
    else:
        order = torch.arange(longest, device=device).expand(len(ids), epochs, longest)

    step = torch.arange(count, device=device).unsqueeze(-1)  # [S, 1]
    within = step % passes  # [S, k]
    at = (within * width).unsqueeze(-1) + torch.arange(width, device=device)  # [S, k, B]
    at = torch.minimum(at, (size - 1).clamp(min=0).unsqueeze(-1))  # padding repeats a row
    epoch = (step // passes).clamp(max=epochs - 1).unsqueeze(-1)
    mine = torch.arange(len(ids), device=device).unsqueeze(-1)
    number = np.arange(count)[:, None]
    if work.class_shares is None:
        rows = order[mine, epoch, at]
    else:
        rows = _by_class(work.class_shares, store.y, start, size, longest, rng.fold(keys, step + 2**33), width)
    return Plan(
        rows=rows + start.unsqueeze(-1),
        live=np.clip(sizes - number % per_epoch * width, 0, width) * (number < steps),
        steps=steps,
        keys=rng.fold(keys, step + 2**32),
        first=within == 0,
    )


def _by_class(
    shares: Literal["equal"] | tuple[float, ...],
    y: Tensor,
    start: Tensor,
    size: Tensor,
    longest: int,
    keys: Tensor,
    width: int,
) -> Tensor:
    """[S, k, B] indices into each client's rows: a class by its share, then one of its rows, in integer arithmetic.

    Shares are rounded to 2^-30 of the largest, so that every device draws the same rows.
    """
    slot = torch.arange(longest, device=y.device)
    at = torch.minimum(start.unsqueeze(-1) + slot, torch.full_like(slot, max(len(y) - 1, 0)))  # [k, L]
    beyond = slot >= size.unsqueeze(-1)
    labels, order = torch.where(beyond, 2**62, y[at].to(torch.int64)).sort(dim=-1, stable=True)
    first = torch.ones_like(beyond)
    first[:, 1:] = labels[:, 1:] != labels[:, :-1]
    if shares == "equal":
        weights = torch.ones_like(labels)
    else:
        table = torch.tensor([max(1, round(share / max(shares) * 2**30)) for share in shares], device=y.device)
        weights = table[labels.clamp(max=len(shares) - 1)]
    edges = torch.where(first & ~beyond, weights, 0).cumsum(-1)  # [k, L] grows where a class begins
    of_class, of_row = (rng.bits(rng.fold(keys, part), width).transpose(0, 1).flatten(1) for part in (0, 1))  # [k, S B]
    begins = torch.searchsorted(edges, of_class % edges[:, -1:].clamp(min=1), right=True).clamp(max=longest - 1)
    ends = torch.searchsorted(labels, labels.gather(1, begins), right=True)
    place = begins + of_row % (ends - begins).clamp(min=1)
    return order.gather(1, place).reshape(len(at), -1, width).transpose(0, 1)
