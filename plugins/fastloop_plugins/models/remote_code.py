"""Models whose Python code ships with them: permission to run it, and values that it leaves undefined."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fastloop import Problem, no_code
from fastloop.problem import counted

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger("fastloop")


def check_code(options: Any, where: str) -> None:
    """Warn of the code that ships with the model. Refuse it, and kernels of the hub, with ``--no-code``.

    Args:
        options: The options of the section ``model``.
        where: The place of the options in the recipe, for messages.
    """
    source = options.name or options.tokenizer
    if options.trust_remote_code:
        no_code.refuse(f"{where}.trust_remote_code", f"it runs the Python code that ships with {source}")
        logger.warning(
            Problem(
                f"runs the Python code that ships with {source}.",
                code="runs-remote-code",
                place="model.trust_remote_code",
            )
        )
    kernel = options.attn_implementation or ""
    # transformers downloads a kernel for names such as "owner/kernel", and for flash_attention_2 if the package
    # kernels is installed
    is_downloaded = "/" in kernel
    if kernel.startswith("flash_attention") and find_spec("kernels") is not None:
        is_downloaded = True
    if is_downloaded:
        no_code.refuse(f"{where}.attn_implementation", f"it runs the kernel {kernel} of the hub")


@contextmanager
def marking_undefined() -> Iterator[None]:
    """Let torch fill new tensors inside this context, see ``is_undefined``, instead of leaving what the memory held."""
    import torch

    memory: Any = torch.utils.deterministic
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)


def is_undefined(tensor: Tensor) -> bool:
    """Whether a tensor has the values with which torch fills new memory: NaN, the largest integer, or true."""
    import torch

    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    largest = True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
    return tensor.numel() > 0 and bool((tensor == largest).all())


def define_values(model: nn.Module, new: Iterable[str], name: str) -> None:
    """Give the weights and buffers of a pretrained model that are undefined the values of the class's constructor.

    transformers builds a model without values, and loads the files into it. It expects the class to set the others in
    ``_init_weights``. Code that was written for transformers 4 often leaves some to the constructor, such as a bias, or
    a table of positions that no file has.

    Args:
        model: The model as ``from_pretrained`` returns it inside ``marking_undefined``.
        new: Names of weights that the files lack.
        name: The pretrained model, for messages.
    """
    import torch

    tensors: dict[str, Tensor] = model.state_dict()
    known = set(tensors) - set(new)
    tensors |= dict(model.named_buffers())  # also those that are in no file
    undefined = [key for key, tensor in tensors.items() if key not in known and is_undefined(tensor)]
    if not undefined:
        return
    built: Any = type(model)(model.config)
    initial = built.state_dict() | dict(built.named_buffers())
    with torch.no_grad():
        for key in undefined:
            tensors[key].copy_(initial[key])
    logger.info(
        "the code of %s sets no values for %s that its files lack, such as %s: those of the constructor are used",
        name,
        counted(len(undefined), "tensor"),
        undefined[0],
    )
