"""Outputs that a caller gives: torch may write them, and they lie apart from all that is read, and from each other.

By addresses alone, so that views of one storage, and tensors that other libraries made of the same memory, are alike.
Addresses are facts that a remembered launch is found again by, so they are read when a launch is packed and never
when it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Named = tuple[str, torch.Tensor | None]


def check_outputs(outputs: Iterable[Named], inputs: Iterable[Named]) -> None:
    """Raises ValueError for an output that torch may not write, or that shares memory with an input, with another output
    or with itself.

    None and tensors without elements share nothing. Of tensors whose elements take turns in memory those of one row
    length are told apart, as columns of one matrix are; others are refused.
    """
    spans: list[tuple[int, int, int, bool, str, torch.Tensor]] = []
    for tensors, is_output in ((outputs, True), (inputs, False)):
        for name, t in tensors:
            if t is not None and t.numel() > 0:
                if is_output and t.is_inference() and not torch.is_inference_mode_enabled():
                    raise ValueError(
                        f"{name} is an inference tensor, which is written under torch.inference_mode() alone; call "
                        "there, or make it outside"
                    )
                if is_output:
                    _check_distinct(name, t)
                start = t.data_ptr()
                spans.append((start, start + _extent(t), len(spans), is_output, name, t))
    spans.sort()
    begun = spans[:0]
    for span in spans:
        begun = [other for other in begun if other[1] > span[0]]
        for other in begun:
            if (span[3] or other[3]) and not _take_turns(span[5], other[5]):
                (*_, mine, _), (*_, its, _) = (span, other) if span[3] else (other, span)
                raise ValueError(
                    f"{mine} shares memory with {its}, or lies between its elements; an output must lie apart from all "
                    f"that the call reads or writes: give {mine} memory of its own"
                )
        begun.append(span)


def _check_distinct(name: str, t: torch.Tensor) -> None:
    """Raises ValueError for an output of which two elements may be one in memory."""
    if t.is_contiguous():
        return
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if stride < extent:
            raise ValueError(
                f"{name} has rows that overlap, with strides {t.stride()}; give a tensor of distinct elements"
            )
        extent += (size - 1) * stride


def _extent(t: torch.Tensor, period: int = 0) -> int:
    """Bytes from the first element to the end of the last, but for dimensions of strides of whole ``period``s."""
    last = 0
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if not period or stride % period:
            last += (size - 1) * stride
    return (last + 1) * t.element_size()


def _take_turns(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both repeat after some number of bytes, and lie in different parts of it."""
    ahead = other.data_ptr() - one.data_ptr()
    for t in (one, other):
        for stride in t.stride():
            period = stride * t.element_size()
            first, second = (_extent_in(x, period) for x in (one, other))
            if 0 < first <= ahead % period and 0 < second <= -ahead % period:
                return True
    return False


def _extent_in(t: torch.Tensor, period: int) -> int:
    """Bytes that the elements take in every ``period``; 0 where they do not repeat in it."""
    size = t.element_size()
    if period == 0 or period % size:
        return 0
    extent = _extent(t, period // size)
    return extent if extent <= period else 0
