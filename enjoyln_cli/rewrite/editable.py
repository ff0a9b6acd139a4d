"""May the weights of a live model be edited in place?

Every function that edits such weights asks this before it writes anything. A weight may be edited
if torch can write to it, and if all that covers its bytes is edited alike: other names of the
parameter, and parameters that are the same elements of the same memory. Bytes that a tensor of
another layout covers, or a tensor that is no parameter, may not be edited.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.extents import extent_of, overlapping, placed
from enjoyln_cli.models.load import values_of
from enjoyln_cli.models.norm_modules import PLAIN_TENSORS, first_names


def require_editable(
    model: nn.Module,
    edits: Mapping[str, object],
    *,
    replaced: Collection[str] = (),
    read_on_demand: bool = False,
) -> None:
    """Raise ``UnsupportedModel`` if ``model`` cannot be edited, or if more would change.

    * ``edits`` are by name. Weights with equal edits are edited alike. Other weights stay as they
      are, unless the class ties them to one of these.
    * ``replaced`` are names of parameters that get memory of their own first.
    * ``read_on_demand``: weights that are not in memory are edited when they are read.
    """
    values = values_of(model)
    for name in edits:
        if name in values and (why := _why_not(values[name], read_on_demand)):
            raise UnsupportedModel(f"{name}: {why}")
    attributes = _attributes(model, values.values())
    everywhere = [named for named in values.items() if named[0] not in replaced]
    everywhere += attributes
    alike = _edits_of_all(model, edits)
    for (one, first), (other, second) in overlapping(placed(everywhere)):
        same = alike.get(one) == alike.get(other)
        if same and (first == second or one not in alike):
            continue
        one, other = (one, other) if one in alike else (other, one)
        raise UnsupportedModel(
            f"{one} shares its memory with {other}, which would change too; give {other} memory of "
            "its own (tensor.detach().clone()), and analyse the model again"
        )


def _why_not(tensor: torch.Tensor, read_on_demand: bool) -> str:
    """Why torch cannot write the values of ``tensor``; empty if it can."""
    if tensor.is_meta:
        why = "its values are not in memory (offloaded, say); load the model without offloading"
        return "" if read_on_demand else why
    if type(tensor) not in PLAIN_TENSORS:
        return f"is a {type(tensor).__name__}, not a plain tensor; edit the model before that"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in torch.inference_mode(), so it cannot change; use copy.deepcopy(model)"
    if _repeats_memory(tensor):
        return "its elements share memory (expanded, say); replace it by tensor.clone()"
    if _is_read_only(tensor):
        return "its memory is read-only (a mapped file, say); replace it by tensor.clone()"
    return ""


def _is_read_only(tensor: torch.Tensor) -> bool:
    """Whether writing to ``tensor`` would end the process, as on ``np.load(mmap_mode="r")``.

    torch cannot say this, but the operating system can: it refuses to read a pipe into such memory.
    The byte that it reads is the byte that already stands there.
    """
    place = extent_of(tensor)
    if place is None or tensor.device.type != "cpu" or not hasattr(os, "readv"):
        return False
    byte = (ctypes.c_char * 1).from_address(place.stop - 1)
    reader, writer = os.pipe()
    try:
        os.write(writer, byte)
        os.readv(reader, [byte])
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return True
    finally:
        os.close(reader)
        os.close(writer)
    return False


def _repeats_memory(tensor: torch.Tensor) -> bool:
    """Whether two elements of ``tensor`` may be at one address, as in expanded tensors and windows.

    No two are if each stride is longer than all that the shorter strides reach.
    """
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


def _edits_of_all(model: nn.Module, edits: Mapping[str, object]) -> dict[str, object]:
    """``edits`` with all names of each edited weight.

    Other names of a weight are the names that the class ties to it, and the names in a module that
    is registered several times.
    """
    tied, first = getattr(model, "all_tied_weights_keys", {}), first_names(model)
    groups = {tied.get(name, name): edit for name, edit in edits.items()}
    found = dict(edits)
    for name in values_of(model):
        path, _, last = name.rpartition(".")
        for other in (tied.get(name, name), f"{first.get(path, path)}.{last}"):
            if other in groups or other in edits:
                found.setdefault(name, edits.get(other, groups.get(other)))
    return found


def _attributes(
    model: nn.Module, values: Iterable[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are plain attributes of a module, by name."""
    known = {*map(id, values)}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value) not in known:
                yield f"{path}.{name}" if path else name, value
