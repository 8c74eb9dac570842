"""Triton kernels that convolve the pictures of many clients at once, each client with weights of its own.

A convolution is one matrix product per client, whose left factor has a row for every output pixel and a column for
every weight of a kernel. The kernels form that factor in registers, tile by tile, and never write it to memory: the
columns of the usual 3 x 3 kernel take nine times the memory of the pictures. No sum depends on the order in which
programs run, so that results repeat bit for bit.

This module imports Triton, which PyTorch's builds for CUDA bring along; `client_convolutions` imports it where it is
there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ENOUGH_PROGRAMS = 512  # fewer leave a large GPU idle; a constant, so that sums are split alike on every device
LEAST_PIXELS = 256  # of one part of a sum over pixels
SPLIT = True  # factors of gradients, see `_correlate`


@dataclass(frozen=True)
class Geometry:
    """Stride, padding and dilation, vertical and horizontal."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def output_size(self, size: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the convolved picture."""
        height, width = (
            (size[at] + 2 * self.padding[at] - self.dilation[at] * (kernel[at] - 1) - 1) // self.stride[at] + 1
            for at in (0, 1)
        )
        return height, width

    @property
    def constants(self) -> dict[str, int]:
        """As the kernels take them."""
        names = ("STRIDE", "PADDING", "DILATION")
        pairs = (self.stride, self.padding, self.dilation)
        return {f"{name}_{side}": pair[at] for name, pair in zip(names, pairs) for at, side in enumerate("HW")}


@triton.jit
def _convolve(
    source, weights, bias, positive, target, corners, tiles, pixels, s_client, s_picture, s_channel, s_line, s_column,
    AREA: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIASED: tl.constexpr, RECTIFIED: tl.constexpr, POOLED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """target [client, pixel, output] from source [client, picture, channel, line, column], by [client, output, weight].

    A picture of the target has COLUMNS pixels to a line and AREA in all, one of the source HEIGHT x WIDTH. TRANSPOSED:
    the source is the gradient of a convolution's result, the target that of its input. RECTIFIED: negative values
    become 0. POOLED: a target pixel is the largest of 2 x 2, whose place goes to `corners` (4: none is positive); they
    follow one another in a tile. MASKED: 0 where `positive`, which lies as the target does, is not above 0.
    """
    client = (tl.program_id(0) // tiles).to(tl.int64)
    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    source += client * s_client
    weights += client * (OUTPUTS * TAPS * CHANNELS)
    if POOLED:
        picture, rest = pixel // 4 // AREA, pixel // 4 % AREA
        line, column = rest // COLUMNS * 2 + pixel % 4 // 2, rest % COLUMNS * 2 + pixel % 2
    else:
        picture, rest = pixel // AREA, pixel % AREA
        line, column = rest // COLUMNS, rest % COLUMNS
    if TRANSPOSED:
        line, column = line + PADDING_H, column + PADDING_W
    else:
        line, column = line * STRIDE_H - PADDING_H, column * STRIDE_W - PADDING_W
    here = (pixel < pixels)[:, None]
    one_tap: tl.constexpr = CHANNELS % BLOCK_K == 0
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, TAPS * CHANNELS, BLOCK_K):
        weight = first + tl.arange(0, BLOCK_K)
        channel = weight % CHANNELS
        if one_tap:
            tap = first // CHANNELS
            down, right = (tap // KERNEL_W) * DILATION_H, (tap % KERNEL_W) * DILATION_W
        else:
            tap = weight // CHANNELS
            down, right = ((tap // KERNEL_W) * DILATION_H)[None, :], ((tap % KERNEL_W) * DILATION_W)[None, :]
        if TRANSPOSED:
            at_line, at_column = line[:, None] - down, column[:, None] - right
            inside = (at_line >= 0) & (at_column >= 0)
            if STRIDE_H > 1 or STRIDE_W > 1:
                inside = inside & (at_line % STRIDE_H == 0) & (at_column % STRIDE_W == 0)
                at_line, at_column = at_line // STRIDE_H, at_column // STRIDE_W
        else:
            at_line, at_column = line[:, None] + down, column[:, None] + right
            inside = (at_line >= 0) & (at_column >= 0)
        if TRANSPOSED or PADDING_H > 0 or PADDING_W > 0:
            inside = inside & (at_line < HEIGHT) & (at_column < WIDTH) & here & (weight < TAPS * CHANNELS)[None, :]
        else:
            inside = here & (weight < TAPS * CHANNELS)[None, :]
        places = picture[:, None] * s_picture + at_line * s_line + at_column * s_column + channel[None, :] * s_channel
        left = tl.load(source + places, mask=inside, other=0.0)
        known = (output < OUTPUTS)[None, :] & (weight < TAPS * CHANNELS)[:, None]
        right_factor = tl.load(weights + output[None, :] * (TAPS * CHANNELS) + weight[:, None], mask=known, other=0.0)
        total = tl.dot(left, right_factor, total, input_precision="tf32")
    if BIASED:
        total += tl.load(bias + client * OUTPUTS + output, mask=output < OUTPUTS, other=0.0)[None, :]
    if POOLED:
        four = tl.reshape(total, (BLOCK_M // 4, 4, BLOCK_N))
        unknown = four != four  # NaN, which a comparison does not find
        total, corner = tl.max(tl.where(unknown, float("inf"), four), 1, return_indices=True)
        total = tl.where(tl.max(unknown.to(tl.int32), 1) > 0, float("nan"), total)
        pixel = (tl.program_id(0) % tiles) * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
        pixels = pixels // 4
        here = (pixel < pixels)[:, None]
    place = client * pixels * OUTPUTS + pixel[:, None] * OUTPUTS + output[None, :]
    known = here & (output < OUTPUTS)[None, :]
    if POOLED:
        tl.store(corners + place, tl.where(total <= 0, 4, corner).to(tl.uint8), mask=known)
    if RECTIFIED:
        total = tl.where(total <= 0, 0.0, total)
    if MASKED:
        total = tl.where(tl.load(positive + place, mask=known, other=0.0) <= 0, 0.0, total)
    tl.store(target + place, total, mask=known)


@triton.jit
def _unpool(
    grad, corners, target, g_picture, g_output, g_pixel,
    AREA: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """target [picture, line, column, output] from the gradient of its 2 x 2 pooling, which goes to the `corners`."""
    picture = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = (pixel < AREA)[:, None] & (output < OUTPUTS)[None, :]
    places = picture * g_picture + pixel[:, None] * g_pixel + output[None, :] * g_output
    value = tl.load(grad + places, mask=known, other=0.0)
    places = picture * (AREA * OUTPUTS) + pixel[:, None] * OUTPUTS + output[None, :]
    corner = tl.load(corners + places, mask=known, other=4)
    first = (pixel // COLUMNS * (2 * WIDTH) + pixel % COLUMNS * 2)[:, None] * OUTPUTS + output[None, :]
    target += picture * (HEIGHT * WIDTH * OUTPUTS)
    for here in tl.static_range(4):
        place = first + (here // 2 * WIDTH + here % 2) * OUTPUTS
        tl.store(target + place, tl.where(corner == here, value, 0.0), mask=known)


@triton.jit
def _halves(value):
    """Two bfloat16 numbers whose sum is the value, up to 2^-16 of it.

    The first is the value with its last bits cut off, not rounded: a conversion to bfloat16 of one number takes the
    device four times as long as other operations do.
    """
    high = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (value - high).to(tl.bfloat16)


@triton.jit
def _correlate(
    source, above, target, tiles, clients, pixels, part,
    s_client, s_picture, s_channel, s_line, s_column, a_client, a_picture, a_output, a_line, a_column,
    AREA: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """target [part, client, weight, output]: a sum over `part` pixels of the source times the gradient above it.

    The last weight is the bias. SPLIT: factors are multiplied as sums of two bfloat16 values each,
    which rounds less than tf32 does: matrix units take no transposed factors in tf32.
    """
    client = (tl.program_id(0) // tiles).to(tl.int64)
    weight = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    output = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    source += client * s_client
    above += client * a_client
    tap, channel = weight // CHANNELS, weight % CHANNELS
    down, right = (tap // KERNEL_W) * DILATION_H - PADDING_H, (tap % KERNEL_W) * DILATION_W - PADDING_W
    shift = down * s_line + right * s_column + channel * s_channel
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    by_bias = tl.zeros((BLOCK_K, BLOCK_M), dtype=tl.float32)
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, pixels)  # the last part may be shorter
    for first in range(0, part, BLOCK_K):
        pixel = begin + first + tl.arange(0, BLOCK_K)
        picture, rest = pixel // AREA, pixel % AREA
        line, column = rest // COLUMNS, rest % COLUMNS
        at_line, at_column = line * STRIDE_H, column * STRIDE_W
        inside = (pixel < end)[:, None] & (weight < TAPS * CHANNELS)[None, :]
        if PADDING_H > 0:
            reached = at_line[:, None] + down[None, :]
            inside = inside & (reached >= 0) & (reached < HEIGHT)
        if PADDING_W > 0:
            reached = at_column[:, None] + right[None, :]
            inside = inside & (reached >= 0) & (reached < WIDTH)
        places = picture * s_picture + at_line * s_line + at_column * s_column
        value = tl.load(source + places[:, None] + shift[None, :], mask=inside, other=0.0)
        places = picture * a_picture + line * a_line + column * a_column
        known = (pixel < end)[:, None] & (output < OUTPUTS)[None, :]
        grad = tl.load(above + places[:, None] + output[None, :] * a_output, mask=known, other=0.0)
        if tl.program_id(0) % tiles == 0:
            by_bias += grad
        if SPLIT:
            value_high, value_low = _halves(value)
            grad_high, grad_low = _halves(grad)
            total = tl.dot(tl.trans(grad_high), value_low, total)
            total = tl.dot(tl.trans(grad_low), value_high, total)
            total = tl.dot(tl.trans(grad_high), value_high, total)
        else:
            total = tl.dot(tl.trans(grad), value, total, input_precision="tf32")
    row = (tl.program_id(2).to(tl.int64) * clients + client) * (TAPS * CHANNELS + 1)
    to = target + (row + weight[:, None]) * OUTPUTS + output[None, :]
    tl.store(to, tl.trans(total), mask=(weight < TAPS * CHANNELS)[:, None] & (output < OUTPUTS)[None, :])
    if tl.program_id(0) % tiles == 0:
        tl.store(target + (row + TAPS * CHANNELS) * OUTPUTS + output, tl.sum(by_bias, 0), mask=output < OUTPUTS)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, *, rectified: bool = False) -> Tensor:
    """x [G, B, C, H, W], weight [G, O, h, w, C] -> [G, B, O, H', W'], channels last."""
    size = geometry.output_size((x.shape[3], x.shape[4]), (weight.shape[2], weight.shape[3]))
    target = _pictures(x, weight, size)
    _launch(x, weight, bias, geometry, target, rectified=rectified)
    return target.permute(0, 1, 4, 2, 3)


def convolve_and_pool(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """(the largest of every 2 x 2 values and 0, [G, B, O, H' / 2, W' / 2]; which it is, 4: none is positive)."""
    height, width = geometry.output_size((x.shape[3], x.shape[4]), (weight.shape[2], weight.shape[3]))
    target = _pictures(x, weight, (height // 2, width // 2))
    corners = torch.empty(target.shape, dtype=torch.uint8, device=x.device)
    _launch(x, weight, bias, geometry, target, rectified=True, corners=corners)
    return target.permute(0, 1, 4, 2, 3), corners.permute(0, 1, 4, 2, 3)


def input_gradient(
    grad: Tensor, weight: Tensor, size: tuple[int, int], geometry: Geometry, positive: Tensor | None = None
) -> Tensor:
    """The gradient by the input, of this size; weight: [G, C, h, w, O]. 0 where `positive` is not above 0."""
    target = _pictures(grad, weight, size)
    if positive is not None:
        positive = positive.permute(0, 1, 3, 4, 2).contiguous()
    _launch(grad, weight, None, geometry, target, transposed=True, positive=positive)
    return target.permute(0, 1, 4, 2, 3)


def _pictures(x: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
    return torch.empty(*x.shape[:2], *size, weight.shape[1], dtype=x.dtype, device=x.device)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    target: Tensor,
    *,
    transposed: bool = False,
    rectified: bool = False,
    corners: Tensor | None = None,
    positive: Tensor | None = None,
) -> None:
    clients, pictures, channels, height, width = x.shape
    rows, columns, outputs = target.shape[2:]
    kernel = (weight.shape[2], weight.shape[3])
    pixels, weights = pictures * rows * columns * (1 if corners is None else 4), kernel[0] * kernel[1] * channels
    block_n = min(128, max(16, triton.next_power_of_2(outputs)))
    tiles = triton.cdiv(pixels, 128)
    _convolve[(tiles * clients, triton.cdiv(outputs, block_n))](
        x, weight.contiguous(), target if bias is None else bias.contiguous(), target if positive is None else positive,
        target, target if corners is None else corners, tiles, pixels, *x.stride(),
        AREA=rows * columns, COLUMNS=columns, HEIGHT=height, WIDTH=width,
        CHANNELS=channels, OUTPUTS=outputs, TAPS=kernel[0] * kernel[1], KERNEL_W=kernel[1], **geometry.constants,
        TRANSPOSED=transposed, BIASED=bias is not None, RECTIFIED=rectified, POOLED=corners is not None,
        MASKED=positive is not None,
        BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=min(32, max(16, triton.next_power_of_2(weights))),
        num_warps=8 if block_n == 128 or positive is not None else 4, num_stages=3,
    )  # fmt: skip


def unpool(grad: Tensor, corners: Tensor, size: tuple[int, int]) -> Tensor:
    """The gradient of values of this size by that of `convolve_and_pool`: [G, B, O, H, W], channels last."""
    clients, pictures, outputs, rows, columns = grad.shape
    if grad.stride(3) != columns * grad.stride(4) or grad.stride(0) != pictures * grad.stride(1):
        grad = grad.contiguous()
    pooled = size == (2 * rows, 2 * columns)  # every value; else the last row or column is in no pool
    make = torch.empty if pooled else torch.zeros
    target = make(clients, pictures, *size, outputs, dtype=grad.dtype, device=grad.device)
    block_n = min(64, max(16, triton.next_power_of_2(outputs)))
    grid = (clients * pictures, triton.cdiv(rows * columns, 32), triton.cdiv(outputs, block_n))
    _unpool[grid](
        grad, corners.permute(0, 1, 3, 4, 2).contiguous(), target, grad.stride(1), grad.stride(2), grad.stride(4),
        AREA=rows * columns, COLUMNS=columns, HEIGHT=size[0], WIDTH=size[1], OUTPUTS=outputs,
        BLOCK_M=32, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return target.permute(0, 1, 4, 2, 3)


def weight_gradient(grad: Tensor, x: Tensor, kernel: tuple[int, int], geometry: Geometry) -> Tensor:
    """The gradients by the weights, and after them by the bias: [G, h w C + 1, O]."""
    clients, pictures, channels, height, width = x.shape
    outputs, rows, columns = grad.shape[2:]
    pixels, weights = pictures * rows * columns, kernel[0] * kernel[1] * channels
    block_m = min(64, max(16, triton.next_power_of_2(outputs)))
    block_n = min(64, max(16, triton.next_power_of_2(weights)))
    split = SPLIT and block_m == block_n == 64  # in smaller blocks tf32 is faster
    blocks, tiles = triton.cdiv(outputs, block_m), triton.cdiv(weights, block_n)
    parts = min(triton.cdiv(ENOUGH_PROGRAMS, clients * tiles * blocks), triton.cdiv(pixels, LEAST_PIXELS))
    sums = torch.empty(parts, clients, weights + 1, outputs, dtype=x.dtype, device=x.device)
    _correlate[(tiles * clients, blocks, parts)](
        x, grad, sums, tiles, clients, pixels, triton.cdiv(pixels, parts), *x.stride(), *grad.stride(),
        AREA=rows * columns, COLUMNS=columns, HEIGHT=height, WIDTH=width,
        CHANNELS=channels, OUTPUTS=outputs, TAPS=kernel[0] * kernel[1], KERNEL_W=kernel[1], **geometry.constants,
        SPLIT=split, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=32, num_warps=4, num_stages=1,
    )  # fmt: skip
    return sums[0] if parts == 1 else sums.sum(0)
