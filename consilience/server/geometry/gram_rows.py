"""Gram matrices of many matrices, computed a few rows at a time, so that m n^2 numbers need not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

AT_ONCE = 2**24  # numbers held at once (128 MiB)
KEPT = 2**25  # Gram matrices with fewer numbers than this are cached
NOISE = 1e-12  # a centred kernel below this share of the kernel is rounding
RESIDUAL = 1e-11  # the same after a confounder was taken out
ROUNDING = 32 * torch.finfo(torch.float64).eps

Rows = Callable[[slice], Tensor]  # rows a..b of m matrices: [m, b - a, n]


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """(columns centred, each of [m, n, p] divided by its scale; [m] scales, powers of two): no square overflows."""
    x = x.to(torch.float64)
    largest = x.abs().amax((1, 2))
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    x = x / scale[:, None, None]
    centred = x - x.mean(1, keepdim=True)
    varies = centred.abs().amax(1, keepdim=True) > ROUNDING * x.abs().amax(1, keepdim=True)
    return torch.where(varies, centred, 0.0), scale  # a constant column is exactly zero, not rounding


@dataclass(frozen=True, eq=False, kw_only=True)
class Grams:
    """m symmetric matrices [n, n]; one with a squared norm below `floor` is rounding."""

    rows: Rows
    m: int
    n: int
    floor: Tensor | float = 0.0  # [m]

    @staticmethod
    def given(gram: Tensor) -> Grams:
        """Matrices [m, n, n] that exist already."""
        return Grams(rows=lambda part: gram[:, part], m=len(gram), n=gram.shape[1])

    @staticmethod
    def linear(x: Tensor) -> Grams:
        """X X', from [m, n, p]."""
        return Grams(rows=_products(x), m=len(x), n=x.shape[1]).kept()

    @staticmethod
    def rbf(x: Tensor, bandwidth: float, offdiag: bool) -> Grams:
        """exp(-d^2 / (2 bandwidth^2 median d^2)), from [m, n, p]."""
        medians = torch.stack([_median(_distances(one[None], slice(None))[0], offdiag) for one in x])
        width = 2 * bandwidth**2 * medians[:, None, None]

        def kernel(part: slice) -> Tensor:
            apart = _distances(x, part)
            return torch.where(width > 0, torch.exp(-apart / torch.where(width > 0, width, 1)), (apart == 0).double())

        return Grams(rows=kernel, m=len(x), n=x.shape[1]).kept()

    def kept(self) -> Grams:
        """The same, cached if it fits."""
        return Grams.given(self.rows(slice(None))) if self.m * self.n**2 <= KEPT else self

    def off_diagonal(self) -> Grams:
        """The same with a zero diagonal."""

        def rows(part: slice) -> Tensor:
            own = torch.arange(self.n, device=(whole := self.rows(part)).device)
            return torch.where(own[part, None] == own[None, :], 0.0, whole)

        return Grams(rows=rows, m=self.m, n=self.n)

    def without(self, confounder: Grams) -> Grams:
        """The residual of least squares on a constant and on the confounder, one [1, n, n] for all."""

        def moments(part: slice) -> Tensor:
            own, third = self.rows(part), confounder.rows(part).expand(self.m, -1, -1)
            values = (own, third, own.square(), third.square(), own * third)
            return torch.stack([value.sum((1, 2)) for value in values])

        total, third_total, squares, third_squares, products = self._sum(moments) / self.n**2
        spread = third_squares - third_total.square()
        varies = spread > NOISE * third_squares  # a constant confounder explains nothing that centring does not
        slope = torch.where(varies, (products - total * third_total) / torch.where(varies, spread, 1), 0.0)
        offset = total - slope * third_total

        def rows(part: slice) -> Tensor:
            return self.rows(part) - slope[:, None, None] * confounder.rows(part) - offset[:, None, None]

        return Grams(rows=rows, m=self.m, n=self.n, floor=RESIDUAL**2 * self.n**2 * squares)

    def positive(self) -> Grams:
        """Projection onto non-negative eigenvalues; for matrices that are given."""
        values, vectors = torch.linalg.eigh(self.rows(slice(None)))
        return replace(self, rows=_products(vectors * values.clamp(min=0).sqrt().unsqueeze(1)))

    @staticmethod
    def positive_residual(x: Tensor, confounder: Tensor) -> Grams:
        """`linear(x).without(linear(confounder)).positive()` of centred [m, n, p] and [n, q], by features alone.

        With [X Z] = QR the residual XX' - b ZZ' is Q (R diag(1, -b) R') Q', whose middle is at most [p + q, p + q].
        """
        shared = (confounder.mT @ confounder).square().sum()
        slope = (x.mT @ confounder).square().sum((1, 2)) / torch.where(shared > 0, shared, 1)
        q, r = torch.linalg.qr(torch.cat([x, confounder.expand(len(x), -1, -1)], 2))
        signs = torch.ones_like(r[:, 0])
        signs[:, x.shape[2] :] = -slope.unsqueeze(1)
        values, vectors = torch.linalg.eigh((r * signs.unsqueeze(1)) @ r.mT)
        features = q @ (vectors * values.clamp(min=0).sqrt().unsqueeze(1))  # [m, n, min(n, p + q)]
        floor = RESIDUAL**2 * (x.mT @ x).square().sum((1, 2))
        return Grams(rows=_products(features), m=len(x), n=x.shape[1], floor=floor)

    def centred(self) -> Grams:
        """HKH, H = 1 - 11'/n: its products are (n - 1)^2 times the biased HSIC."""
        return self._less_means(self.n, self.n**2)

    def centred_without_bias(self) -> Grams:
        """U-centred (Szekely and Rizzo 2014): its products are n (n - 3) times the unbiased HSIC; none below n = 4."""
        n = self.n
        if n < 4:
            return Grams.given(torch.zeros_like(self.rows(slice(None))))
        within = self.off_diagonal()._less_means(n - 2, (n - 1) * (n - 2))
        cleared = within.off_diagonal()
        return Grams(rows=cleared.rows, m=self.m, n=n, floor=within.floor)

    def _less_means(self, row_count: int, count: int) -> Grams:
        """Less row sum / row_count and column sum / row_count, plus total / count."""
        sums = torch.cat([self.rows(part).sum(2) for part in self._blocks()], 1)  # [m, n]
        squares = self._sum(lambda part: self.rows(part).square().sum((1, 2)))
        means, grand = sums / row_count, sums.sum(1)[:, None, None] / count

        def rows(part: slice) -> Tensor:
            return self.rows(part) - means[:, part, None] - means[:, None, :] + grand

        return Grams(rows=rows, m=self.m, n=self.n, floor=NOISE**2 * squares + self.floor)

    def _blocks(self) -> Iterator[slice]:
        return _blocks(self.m, self.n)

    def _sum(self, function: Callable[[slice], Tensor]) -> Tensor:
        return torch.stack([function(part) for part in self._blocks()]).sum(0)


def _products(x: Tensor) -> Rows:
    """Rows of X X', from [m, n, p]."""
    return lambda part: x[:, part] @ x.mT


def inner_products(kernels: Sequence[Grams]) -> Tensor:
    """[M, M] sums of elementwise products between all matrices of all groups; 0 with one that is only rounding."""
    many, n = sum(kernel.m for kernel in kernels), kernels[0].n
    products = torch.zeros((), dtype=torch.float64)
    for part in _blocks(many, n):
        flat = torch.cat([kernel.rows(part) for kernel in kernels]).flatten(1)  # [M, b n]
        products = products.to(flat.device) + flat @ flat.mT
    floors = [torch.as_tensor(kernel.floor, dtype=torch.float64).expand(kernel.m) for kernel in kernels]
    void = products.diagonal() <= torch.cat([floor.to(products.device) for floor in floors])
    return torch.where(void[:, None] | void[None, :], 0.0, products)


def linear_products(stacks: Sequence[Tensor]) -> Tensor:
    """[M, M] of |X_j' X_i|^2 = <K_i, K_j> between matrices [m, n, p], by Gram matrices or by features: the cheaper."""
    many, n = sum(len(stack) for stack in stacks), stacks[0].shape[1]
    widest = max(stack.shape[2] for stack in stacks)
    if n * (widest + many) <= many * widest**2:  # M n^2 p to make them and M^2 n^2 to multiply, against M^2 n p^2
        return inner_products([Grams.linear(stack) for stack in stacks])
    matrices = [matrix for stack in stacks for matrix in stack]
    return torch.stack([_against(matrix, stacks) for matrix in matrices])


def _against(matrix: Tensor, stacks: Sequence[Tensor]) -> Tensor:
    """[M] of |X_j' X|^2 for one X [n, p]."""
    return torch.cat([(stack.mT @ matrix).square().sum((1, 2)) for stack in stacks])


def _blocks(m: int, n: int) -> Iterator[slice]:
    """Groups of rows of m matrices [n, n] that fit in memory."""
    step = max(1, AT_ONCE // (m * n))
    return (slice(at, min(at + step, n)) for at in range(0, n, step))


def _distances(x: Tensor, part: slice) -> Tensor:
    """[m, b - a, n] squared distances between rows."""
    squares = x.square().sum(2)  # [m, n]
    sums = squares[:, part, None] + squares[:, None, :]
    found = sums - 2 * (x[:, part] @ x.mT)
    return torch.where(found > ROUNDING * sums, found, 0.0)  # rows that coincide are at 0, not at rounding


def _median(distances: Tensor, offdiag: bool) -> Tensor:
    """The midpoint median of [n, n], or of its entries off the diagonal."""
    n = len(distances)
    if offdiag and n > 1:
        distances = distances[~torch.eye(n, dtype=torch.bool, device=distances.device)]
    ordered, middle = distances.flatten().sort().values, distances.numel() // 2
    return ordered[middle] if distances.numel() % 2 else (ordered[middle - 1] + ordered[middle]) / 2
