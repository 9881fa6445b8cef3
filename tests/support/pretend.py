"""A pretended accelerator: tensors that say they lie on it and are computed on the CPU.

It refuses what a GPU would refuse (operands on two devices, a generator of the CPU, `.numpy()`)
and counts what a GPU would do silently: copies between host and device, and waits for a value. The
numbers are the CPU's own, so a run on it must equal a run on the CPU to the last bit.

A PrivateUse1 backend in Python: a wrapper subclass that holds the CPU's tensor, and a dispatch mode
that unwraps, computes and wraps. `torch.tensor(…, device=…)` makes its tensor below the dispatcher,
so a function mode makes it on the host and moves it.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import quiverfl
from quiverfl.support.environment import NO_FLOAT64

aten = torch.ops.aten
NAME = "pretend"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
ROOT = str(Path(quiverfl.__file__).parent)

INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
"""Indices may lie on the host while the rest is on the device; each is then copied."""
COPYING = {aten._to_copy.default, aten.copy_.default}
WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
LOOP = {
    ("examples.py", "load_batches"),
    ("step.py", "step"),
    ("trainer.py", "_take_turn"),
    ("single_step.py", "step"),
}
"""What runs once per step: everything below these functions is inside the step loop."""


@dataclass
class Seen:
    """What the device did silently, by `file:line source`; inside the step loop, and elsewhere."""

    steps: Counter[str] = field(default_factory=Counter)
    elsewhere: Counter[str] = field(default_factory=Counter)
    fetched: set[tuple[int, ...]] = field(default_factory=set)
    """Shapes of what was copied to the device."""

    def note(self, what: str) -> None:
        inside, line = _place()
        (self.steps if inside else self.elsewhere)[f"{what} | {line}"] += 1


seen = Seen()


class OnDevice(torch.Tensor):
    """Of the device by its own word; `inner` is where its numbers are."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[OnDevice], inner: torch.Tensor) -> OnDevice:
        assert not isinstance(inner, OnDevice)
        if NAME in NO_FLOAT64 and inner.dtype == torch.float64:
            raise TypeError("Cannot convert a tensor to float64: this device has none of it")
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
            requires_grad=False,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = OnDevice(self.inner.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a device tensor to numpy: use Tensor.cpu() first")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation: refused, counted, computed on the CPU, and wrapped again."""
    flat, _ = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    here = [tensor for tensor in tensors if not isinstance(tensor, OnDevice)]
    wanted = kwargs.get("device")
    target = None if wanted is None else torch.device(wanted).type
    _refuse(func, args, flat, there, here, target)
    _count(func, args, there, here, target)
    inner = {**kwargs, "device": torch.device("cpu")} if target == NAME else kwargs
    found = func(*tree_map(_unwrapped, args), **tree_map(_unwrapped, inner))
    if func is aten._to_copy.default:
        stays = isinstance(args[0], OnDevice) if target is None else target == NAME
        return OnDevice(found) if stays else found
    if func is aten.copy_.default:
        return args[0]
    if target != NAME and (target is not None or not there):
        return found  # made where it was asked for
    known = {id(tensor.inner): tensor for tensor in there}  # in place: the same tensor comes back

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else OnDevice(value)

    return tree_map(wrapped, found)


def _refuse(
    func: Any,
    args: Any,
    flat: list[Any],
    there: list[OnDevice],
    here: list[torch.Tensor],
    target: str | None,
) -> None:
    generators = [value for value in flat if isinstance(value, torch.Generator)]
    if generators and (there or target == NAME):
        raise RuntimeError(f"{func}: a generator of the CPU for a tensor of the device")
    if not there or func in COPYING:
        return
    if func in INDEXING:
        if not isinstance(args[0], OnDevice):
            raise RuntimeError(f"{func}: indices on the device of a tensor on the CPU")
    elif any(tensor.dim() > 0 for tensor in here):  # a number may lie anywhere
        shapes = [tuple(tensor.shape) for tensor in (*there, *here)]
        raise RuntimeError(f"{func}: operands on two devices, shapes {shapes}")


def _count(
    func: Any, args: Any, there: list[OnDevice], here: list[torch.Tensor], target: str | None
) -> None:
    if func is aten._to_copy.default:
        away = isinstance(args[0], OnDevice)
        if away and target == "cpu":
            seen.note("copy to the host")
        elif not away and target == NAME:
            seen.fetched.add(tuple(args[0].shape))
            seen.note("copy to the device")
    elif func is aten.copy_.default:
        if there and here:
            to = "device" if isinstance(args[0], OnDevice) else "host"
            if to == "device":
                seen.fetched.add(tuple(args[1].shape))
            seen.note(f"copy to the {to}")
    elif func in INDEXING and there and any(tensor.dim() > 0 for tensor in here):
        seen.note("copy to the device")
    elif there and (func in WAITING or (func in INDEXING and _has_mask(args))):
        seen.note("wait for a value")


def _has_mask(args: Any) -> bool:
    """Which places a mask holds must be counted before anything of their number can be made."""
    flat, _ = tree_flatten(args[1])
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in flat)


def _unwrapped(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def _place() -> tuple[bool, str]:
    """Whether this is inside the step loop, and the innermost line of the package."""
    inside, line = False, "?"
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(ROOT):
            if line == "?":
                line = f"{path[len(ROOT) + 1 :]}:{frame.f_code.co_name}"
            inside = inside or (Path(path).name, frame.f_code.co_name) in LOOP
            if frame.f_code.co_name == "run" and path.endswith("single_step.py"):
                inside = False  # a Once phase of its own is once per round
        frame = frame.f_back
    return inside, line


class _Computing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class _Making(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnDevice):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(DEVICE)
        makes = func in (torch.tensor, torch.as_tensor) and device is not None
        if makes and torch.device(device).type == NAME:
            del kwargs["device"]
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


@contextlib.contextmanager
def pretended() -> Iterator[Seen]:
    """A device "pretend" is there within; what it did silently is told."""
    seen.steps.clear()
    seen.elsewhere.clear()
    seen.fetched.clear()
    with _Computing(), _Making():
        yield seen
