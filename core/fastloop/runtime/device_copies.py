"""Batches, copied to the device: one copy takes all of the small tensors.

The host needs as long to start the copy of a label as that of an image. ``gather_small`` therefore puts the small
tensors of a batch into one page-locked buffer, in which each is a part, and ``to_device`` copies the buffer at once. On
the device, too, each tensor lies in one buffer.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

ALIGNMENT = 64
"""Bytes: a tensor in a buffer begins at a multiple. Compiled code reads tensors that are aligned to 16 bytes, and
copies others first."""
EXCHANGED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
"""Dtypes of tensors in a buffer: those that DLPack has had from the start."""
SMALL = 2**20
"""Bytes of a tensor in a buffer at most. A larger one has a copy of its own, which takes longer than its start."""


def gather_small(inputs: Any) -> tuple[Any, Tensor | None]:
    """Copy the small tensors of a batch into one page-locked buffer.

    Args:
        inputs: Any nesting of tensors. Those in dicts, lists and tuples are gathered, if they are contiguous and in the
            memory of the host. All others are returned as they are, such as those in containers of other types.

    Returns:
        The inputs, and the buffer, uint8 of shape (bytes,); None if there are fewer than two such tensors.
    """
    small = [leaf for leaf in tree_leaves(inputs, is_leaf=_is_no_container) if _is_small(leaf)]
    if len(small) < 2:
        return inputs, None
    *starts, size = accumulate([_room(tensor) for tensor in small], initial=0)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    places = iter(starts)

    def place(leaf: Any) -> Any:
        return _part(buffer, next(places), leaf).copy_(leaf) if _is_small(leaf) else leaf

    return tree_map(place, inputs, is_leaf=_is_no_container), buffer


def to_device(
    inputs: Any, buffer: Tensor | None, device: torch.device, non_blocking: bool
) -> tuple[Any, Tensor | None]:
    """Copy a batch to the device.

    Args:
        inputs: Any nesting of tensors.
        buffer: The buffer that some of them are parts of; see ``gather_small``.
        non_blocking: Whether the host continues before tensors in page-locked memory are copied.

    Returns:
        The inputs on the device, with the same numbers, dtypes and shapes, and the buffer there. Torch's allocator
        knows the buffer alone: code that calls ``record_stream`` must call it on the buffer, too.
    """
    copied: Tensor | None = None
    if buffer is not None:
        address = buffer.untyped_storage().data_ptr()
        copied = on_device = buffer.to(device, non_blocking=non_blocking)

        def place(leaf: Any) -> Any:
            # a plugin may have replaced a tensor since the batch was pinned
            if not _is_plain(leaf) or leaf.untyped_storage().data_ptr() != address:
                return leaf
            return separate(_part(on_device, leaf.storage_offset() * leaf.itemsize, leaf))

        inputs = tree_map(place, inputs, is_leaf=_is_no_container)
    return send_to_device(inputs, device, non_blocking=non_blocking), copied


def _is_no_container(value: Any) -> bool:
    """Whether ``value`` is none of the containers whose tensors may share a buffer. A subclass may have tensors in
    attributes, too."""
    return type(value) not in (dict, list, tuple)


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is a tensor of the host without a history, whose elements lie in memory as torch stores
    them."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_nested
        and not value.is_quantized
        and not value.requires_grad
    )


def _is_small(value: Any) -> bool:
    return _is_plain(value) and value.dtype in EXCHANGED and value.nbytes <= SMALL and value.is_contiguous()


def _room(tensor: Tensor) -> int:
    """Bytes of a tensor in a buffer, up to the next one: 128 for 100 bytes and for 128."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """The tensor that begins at a byte of a buffer, with the shape, strides and dtype of another one.

    It is no view for autograd: a change of one part in place must not count as a change of the others, which a backward
    pass may still need.
    """
    part = buffer.view(like.dtype).as_strided(like.shape, like.stride(), start // like.itemsize)
    return part.data


def separate(part: Tensor) -> Tensor:
    """The same memory as a tensor that begins there. It keeps the buffer.

    Compiled code for any shape depends on whether a tensor begins at the start of its memory, and takes equal numbers
    among offsets and sizes for one variable. So it would be compiled anew for a mask that is no part of a buffer.
    """
    alone: Tensor = from_dlpack(to_dlpack(part))
    return alone
