"""Similarity of two matrices (weights or activations): CKA and its variants, CCA, HSIC, OSAD, in float64.

Rows are examples, columns are features. Every metric but `osad` compares how the rows lie relative to each other, so
the two matrices need the same number of rows only. Where 0/0 stands in a definition (rows that are all alike, a kernel
that its confounder explains fully) the value is 0, also of a matrix with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from consilience.core.settings import Invalid, nearest
from consilience.server.geometry.gram_rows import Grams, inner_products, linear_products, scaled

Metric = Literal["cka_linear", "cka_rbf", "cka_debiased", "cka_deconfounded", "cca", "hsic", "osad"]
Eigenvalues = Literal["remove", "keep"]
METRICS: tuple[str, ...] = get_args(Metric)
RANK = 1e-10  # singular values below this share of the largest are rounding


def cka_linear(x: Tensor, y: Tensor) -> Tensor:
    """|Y'X|^2 / (|X'X| |Y'Y|), columns centred (Kornblith et al. 2019): invariant to rotations and to scale."""
    return _pair("cka_linear", x, y)


def cka_rbf(x: Tensor, y: Tensor, *, bandwidth: float = 0.5, offdiag: bool = False) -> Tensor:
    """CKA of the kernels exp(-d^2 / 2 sigma^2), sigma^2 = bandwidth^2 x the median of the squared distances d^2.

    The median is over the full matrix, its zero diagonal included, unless `offdiag`. Where it is 0 (more than half of
    the pairs coincide) the kernel is its limit: 1 between coinciding rows, 0 elsewhere.
    """
    return _pair("cka_rbf", x, y, bandwidth=bandwidth, offdiag=offdiag)


def cka_debiased(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA from the unbiased HSIC (Song et al. 2012): about 0 for unrelated matrices, however few the rows.

    It may be negative. Below four rows it does not exist, and is 0.
    """
    return _pair("cka_debiased", x, y)


def cka_deconfounded(K: Tensor, L: Tensor, Z: Tensor, *, negative_eigenvalues: Eigenvalues = "remove") -> Tensor:
    """CKA of what is left of the Gram matrices K and L after least squares on Z, a Gram matrix too (Cui et al. 2022).

    vec(K) is fitted by a + b vec(Z), as vec(L) is. K and L less their fits may have negative eigenvalues: those are set
    to zero, so that both are kernels again and the value lies in [0, 1], or kept, and then it lies in [-1, 1].
    `gram_linear` and `gram_rbf` make Gram matrices.
    """
    # Paper (SimFedSwap): only "dCKA". Here: eigenvalues removed, then centred, as its authors' code does after Cui et
    # al.'s own; the values differ much (0.32 removed, 0.00 kept for noisy copies of a layer), and so do the pairs.
    grams = [_checked("cka_deconfounded", gram, 2)[None] for gram in (K, L, Z)]
    if len({gram.shape for gram in grams}) > 1 or grams[0].shape[1] != grams[0].shape[2]:
        shapes = ", ".join(str(tuple(gram.shape[1:])) for gram in grams)
        raise Invalid(f"cka_deconfounded takes three Gram matrices [n, n] of the same rows, not {shapes}")
    confounder = Grams.given(grams[2])
    left, right = (Grams.given(gram).without(confounder) for gram in grams[:2])
    if negative_eigenvalues == "remove":
        left, right = left.positive(), right.positive()
    return _cosines([left.centred(), right.centred()])[0, 1]


def cca_mean_squared(x: Tensor, y: Tensor) -> Tensor:
    """The mean of the squared canonical correlations, as many as the smaller rank: invariant to any invertible map.

    It is 1 whenever the columns of either span the whole space of n rows, so it is meaningful only for tall matrices.
    """
    return _pair("cca", x, y)


cca = cca_mean_squared


def hsic(x: Tensor, y: Tensor) -> Tensor:
    """tr(KHLH) / (n - 1)^2 of linear kernels, the biased estimate (Gretton et al. 2005); doubling both gives 16 x."""
    return _pair("hsic", x, y)


def osad(x: Tensor, y: Tensor) -> Tensor:
    """Opposite of the sum of absolute differences, -sum |x - y|: 0 for equal matrices; depends on scale and size."""
    # Paper: never defined. Here: what the authors' code computes under the name that is plotted as OSAD.
    return _pair("osad", x, y)


def gram_linear(x: Tensor) -> Tensor:
    """[n, n] products of the centred rows."""
    x = _checked("gram_linear", x, 2)
    x = x - x.mean(0)
    return x @ x.mT


def gram_rbf(x: Tensor, *, bandwidth: float = 0.5, offdiag: bool = False) -> Tensor:
    """[n, n] of exp(-d^2 / 2 sigma^2), sigma as in `cka_rbf`."""
    centred, _ = scaled(_checked("gram_rbf", x, 2)[None])
    return Grams.rbf(centred, bandwidth, offdiag).rows(slice(None))[0]


def all_pairs(
    metric: Metric,
    stacked: Tensor,
    *,
    confounder: Tensor | None = None,
    negative_eigenvalues: Eigenvalues = "remove",
) -> Tensor:
    """[m, m] of a metric between matrices stacked [m, n, p], by matrix products; `confounder` is [n, q], if needed."""
    stacks = [_checked(metric, stacked, 3)]
    return between(metric, stacks, confounder=confounder, negative_eigenvalues=negative_eigenvalues)[0, 0]


def between(
    metric: Metric,
    stacks: Sequence[Tensor],
    *,
    confounder: Tensor | None = None,
    bandwidth: float = 0.5,
    offdiag: bool = False,
    negative_eigenvalues: Eigenvalues = "remove",
) -> Tensor:
    """[s, s, m, m]: the metric between matrix i of stack a and matrix j of stack b; stacks are [m, n, p_a]."""
    if metric not in METRICS:
        raise Invalid(f"metric = {metric!r} is not one of {', '.join(METRICS)}{nearest(metric, METRICS)}")
    rows = {(stack.shape[0], stack.shape[1]) for stack in stacks}
    if len(rows) > 1:
        raise Invalid(f"{metric} compares matrices with the same number of rows, not {sorted(n for _, n in rows)}")
    if metric == "osad":
        flat = _absolute(stacks)
    elif metric == "cca":
        flat = _canonical(stacks)
    elif metric in ("cka_linear", "hsic"):
        flat = _linear(metric, stacks)
    elif metric == "cka_debiased":
        flat = _cosines([Grams.linear(scaled(stack)[0]).centred_without_bias() for stack in stacks])
    elif metric == "cka_rbf":
        flat = _cosines([Grams.rbf(scaled(stack)[0], bandwidth, offdiag).centred() for stack in stacks])
    else:
        if confounder is None:
            raise Invalid("cka_deconfounded needs a confounder: give the matrix [n, q] that both have in common")
        third = scaled(_checked(metric, confounder, 2)[None])[0]
        flat = _cosines([_residual(scaled(stack)[0], third, negative_eigenvalues).centred() for stack in stacks])
    flat = torch.triu(flat) + torch.triu(flat, 1).mT  # symmetric to the last bit
    many, m = len(stacks), stacks[0].shape[0]
    return flat.reshape(many, m, many, m).transpose(1, 2)


def _pair(metric: Metric, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """The metric of two matrices."""
    pair = [_checked(metric, one, 2)[None] for one in (x, y)]
    return between(metric, pair, **options)[0, 1, 0, 0]


def _checked(name: str, x: Tensor, dimensions: int) -> Tensor:
    """In float64, after the refusals."""
    x = torch.as_tensor(x)
    if x.dim() != dimensions or not x.numel():
        raise Invalid(f"{name} takes {dimensions}-d tensors with something in them, not the shape {tuple(x.shape)}")
    x = x.to(torch.float64)
    if not bool(x.isfinite().all()):
        raise Invalid(f"{name} was given NaN or infinite values")
    return x


def _linear(metric: str, stacks: Sequence[Tensor]) -> Tensor:
    """Linear CKA or HSIC, [s m, s m]."""
    sized = [scaled(stack) for stack in stacks]
    products = linear_products([x for x, _ in sized])
    if metric == "cka_linear":
        return _normalised(products)
    scale = torch.cat([scale for _, scale in sized]).square()  # kernels are quadratic in the matrices
    n = stacks[0].shape[1]
    return products * scale[:, None] * scale[None, :] / max(1, n - 1) ** 2


def _residual(x: Tensor, third: Tensor, negative_eigenvalues: Eigenvalues) -> Grams:
    """Linear kernels of [m, n, p] less what that of [1, n, q] explains."""
    if negative_eigenvalues == "remove":
        return Grams.positive_residual(x, third[0])
    return Grams.linear(x).without(Grams.linear(third))


def _cosines(centred: Sequence[Grams]) -> Tensor:
    """Cosines between centred kernels, [s m, s m]."""
    return _normalised(inner_products(centred))


def _normalised(products: Tensor) -> Tensor:
    """[M, M] products over the norms on their diagonal; 0 where a norm is 0."""
    norms = products.diagonal().clamp(min=0).sqrt()
    below = norms[:, None] * norms[None, :]
    return torch.where(below > 0, products / torch.where(below > 0, below, 1), 0.0).clamp(-1, 1)


def _absolute(stacks: Sequence[Tensor]) -> Tensor:
    """OSAD, [s m, s m]."""
    if len({stack.shape for stack in stacks}) > 1:
        shapes = ", ".join(str(tuple(stack.shape[1:])) for stack in stacks)
        raise Invalid(f"osad compares matrices of one shape, not {shapes}")
    flat = torch.cat([stack.flatten(1) for stack in stacks])
    return -torch.cdist(flat, flat, p=1)


def _canonical(stacks: Sequence[Tensor]) -> Tensor:
    """Mean squared canonical correlations, [s m, s m]."""
    bases, ranks = zip(*(_basis(scaled(stack)[0]) for stack in stacks))
    rank = torch.cat(ranks)
    fewer = torch.minimum(rank[:, None], rank[None, :])
    shared = linear_products(bases)  # |Q_j' Q_i|^2 = the sum of the squared correlations
    return torch.where(fewer > 0, shared / fewer.clamp(min=1), 0.0).clamp(0, 1)


def _basis(x: Tensor) -> tuple[Tensor, Tensor]:
    """([m, n, r] orthonormal bases of the columns, zeros beyond the rank; [m] ranks)."""
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    x = x / torch.where(lengths > 0, lengths, 1)  # correlations do not depend on the columns' scales, but ranks would
    basis, values, _ = torch.linalg.svd(x, full_matrices=False)
    used = values > RANK * values[:, :1]
    return basis * used[:, None, :], used.sum(1)
