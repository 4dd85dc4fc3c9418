"""A simulated GPU: tensors that claim to be on ``cuda``, with their data in the host's memory.

It finds operations that a real GPU would refuse, or that would make the host wait. Every operation of torch is
intercepted (attributes are those of :class:`SimulatedGPU`):

* an operation on tensors of the device and of the host is an error, except for tensors without dimensions;
* the host waits if it reads a number of the device, if a shape depends on data of the device, if it copies from memory
  that is not pinned, or if it assigns a number (``x[3] = 5`` copies it): ``waits`` lists the lines of longdraft;
* waiting for an event does not leave the device idle if work is queued behind the event: ``overlapped`` counts those;
* ``launches`` counts operations of the device, ``copies`` copies between it and the host;
* during a capture (``recording``), waits and copies from the host are errors: a CUDA graph would copy the host's old
  memory again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support import torch_kernels

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
# Operations whose output shapes depend on data.
_DATA_DEPENDENT = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal", "bincount"}
_INDEXED = ("index", "index_put_", "index_put", "_index_put_impl_")
# Operations that launch no kernel.
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "scalar_tensor",
    "lift_fresh",
    "detach",
}
_SOURCES = str(Path(__file__).parents[2] / "src" / "longdraft")


class MixedDevicesError(AssertionError):
    """An operation got tensors of the host and of the device."""


class SimulatedTensor(torch.Tensor):
    """A tensor of the device, with its data in the host tensor ``numbers``."""

    numbers: torch.Tensor
    scalar = False  # a number that Python code writes into another tensor: on a real GPU it is still on the host
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> SimulatedTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device="meta",
            storage_size=real.untyped_storage().nbytes(),
        )

    def __init__(self, real: torch.Tensor) -> None:
        self.numbers = real

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        # To torch itself it is on "meta", the only device that needs no backend.
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCard({self.numbers!r})"

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        raise RuntimeError(f"{func} of a tensor of the device, outside the mode that simulates it")


class SimulatedGPU(TorchDispatchMode):
    """Intercepts torch's operations.

    Attributes:
        waits: where the host has waited for the device: "file:line function (operation)".
        launches: number of launched operations; views do not count, a replay counts as one.
        copies: number of copies between host and device.
        overlapped: how often the host waited for an event while the device had work behind it.
        recording: True during a capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.launches = self.copies = self.overlapped = 0
        self.recording = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; dynamo's wrapper around every operation would take time

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        kwargs = dict(kwargs or {})
        name, composite = _known(func)
        tensors = _tensors([*args, *kwargs.values()])
        on_device = any(isinstance(x, SimulatedTensor) for x in tensors)
        where = kwargs.get("device")
        to_device = on_device if where is None else torch.device(where).type in ("cuda", "meta")
        if not on_device and not to_device:
            return func(*args, **kwargs)
        if name in ("_fused_sdp_choice", "is_pinned"):
            return 0
        if composite:  # inference mode does not decompose these
            with self:
                return func.decompose(*args, **kwargs)
        if where is not None:
            kwargs["device"] = torch.device("cpu")
        if name in ("_to_copy", "copy_"):
            self._check_copy(name, args, kwargs, to_device)
        else:
            self._check_devices(name, func, tensors)
            if name in _INDEXED and any(type(x) is torch.Tensor and x.dim() > 0 for x in args[1]):
                self._wait(f"{name} by indices of the host")
            if name in _INDEXED[1:] and getattr(args[2], "scalar", False) and not self._with_mask(args):
                self._wait(f"{name} of a number")
            if name in _DATA_DEPENDENT or name == "_local_scalar_dense" or self._by_mask(name, args):
                self._wait(name)
        kwargs.pop("pin_memory", None)
        out = func(*_to_host(args), **{key: _to_host(x) for key, x in kwargs.items()})
        if not (self.recording or name in _FREE or func.is_view):
            self.launches += 1
        if func._schema.is_mutable and name.endswith("_"):
            return args[0]
        if "out" in kwargs:
            return kwargs["out"]
        # Views of tensors from outside inference mode must be made outside of it too.
        with torch.inference_mode(all(x.is_inference() for x in tensors) and torch.is_inference_mode_enabled()):
            result = _to_simulated(out) if to_device else out
        if name == "scalar_tensor" and isinstance(result, SimulatedTensor):
            result.scalar = True
        return result

    def _check_copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], to_device: bool) -> None:
        source = args[1] if name == "copy_" else args[0]
        target = isinstance(args[0], SimulatedTensor) if name == "copy_" else to_device
        if name == "copy_" and target and getattr(source, "scalar", False):
            self._wait("an assigned number")
            return
        if isinstance(source, SimulatedTensor) == target:
            return
        self.copies += 1
        non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if not target and not non_blocking:
            self._wait(name)
        elif not target and self.recording:
            raise AssertionError(f"a copy to the host was recorded at {_source_line()}")
        elif not target:
            return
        elif self.recording:
            raise AssertionError(f"a copy from the host was recorded at {_source_line()}")
        elif not (non_blocking and getattr(source, "pinned", False)):
            self._wait(f"{name} from memory that is not pinned")

    def _check_devices(self, name: str, func: Any, tensors: list[torch.Tensor]) -> None:
        if name in _INDEXED:
            return
        on_host = [x for x in tensors if not isinstance(x, SimulatedTensor) and x.dim() > 0]
        if on_host:
            raise MixedDevicesError(
                f"{func} of the device's tensors and one of the host, {tuple(on_host[0].shape)}, at {_source_line()}"
            )

    def _by_mask(self, name: str, args: tuple[Any, ...]) -> bool:
        if name not in _INDEXED:
            return False
        return self._with_mask(args) and not (name != "index" and args[2].numel() == 1)

    def _with_mask(self, args: tuple[Any, ...]) -> bool:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])

    def _wait(self, name: str) -> None:
        place = f"{_source_line()} ({name})"
        if self.recording:
            raise AssertionError(f"a recording waits for the device at {place}")
        self.waits.append(place)


class Event:
    """Stands in for a CUDA event."""

    def __init__(self, card: SimulatedGPU) -> None:
        self._card, self._at = card, 0

    def record(self) -> None:
        self._at = self._card.launches

    def synchronize(self) -> None:
        if self._card.launches == self._at:
            self._card._wait("an event behind which nothing is queued")
        else:
            self._card.overlapped += 1


class SimulatedGraphs:
    """Stands in for CUDA graphs: a replay runs the function again and copies its results to the captured outputs.

    Args:
        card: finds operations that must not be captured.
    """

    def __init__(self, card: SimulatedGPU | None = None) -> None:
        self.captures = self.replays = 0
        self._card = card

    def capture(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1
        compute()  # the warm-up
        out = self._recorded(compute)

        def replay() -> Any:
            self.replays += 1
            if self._card is not None:
                self._card.launches += 1
            self._recorded(repeat)
            return out

        def repeat() -> None:
            for old, x in zip(tree_leaves(out), tree_leaves(compute()), strict=True):
                if x is not None:
                    old.copy_(x)

        return replay

    def _recorded(self, compute: Callable[[], Any]) -> Any:
        if self._card is None:
            return compute()
        self._card.recording = True
        try:
            return compute()
        finally:
            self._card.recording = False


# Arguments and results are tensors and lists of them. For these torch's tree functions (pytree) would be too slow.


@cache
def _known(func: Any) -> tuple[str, bool]:
    """An operation's name, and whether it is composed of others."""
    return func._schema.name.removeprefix("aten::"), func._can_decompose()


def _tensors(found: list[Any]) -> list[torch.Tensor]:
    tensors = []
    for x in found:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors += _tensors(x)
    return tensors


def _to_host(x: Any) -> Any:
    if isinstance(x, SimulatedTensor):
        return x.numbers
    return type(x)(map(_to_host, x)) if type(x) in (list, tuple) else x


def _to_simulated(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return SimulatedTensor(x)
    return type(x)(map(_to_simulated, x)) if type(x) in (list, tuple) else x


def _source_line() -> str:
    """The innermost running line of longdraft's source."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_SOURCES):
            return f"{frame.filename.removeprefix(_SOURCES + '/')}:{frame.lineno} {frame.name}"
    return "outside longdraft"


def patch_cuda(monkeypatch: Any, **values: Any) -> None:
    """Makes functions of ``torch.cuda`` return these values."""
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)


@contextmanager
def simulate_gpu(monkeypatch: Any) -> Iterator[SimulatedGPU]:
    """Simulates an NVIDIA GPU (Ampere, 80 GB) with stand-ins for torch's attention kernels."""
    patch_cuda(
        monkeypatch,
        _lazy_init=None,
        get_device_capability=(8, 0),
        mem_get_info=(80 << 30, 80 << 30),
        get_allocator_backend="native",
        memory_snapshot=(),
        max_memory_allocated=0,
        current_device=0,
        get_device_name="a card in name",
        synchronize=None,
    )

    def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
        if any(n > 1 and step == 0 for n, step in zip(self.shape, self.stride(), strict=True)):
            raise RuntimeError("more than one element of the written-to tensor refers to a single memory location")
        pinned = self.clone()
        pinned.pinned = True  # type: ignore[attr-defined]
        return pinned

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with torch_kernels.registered(), SimulatedGPU() as found:
            monkeypatch.setattr(torch.cuda, "Event", lambda: Event(found))
            yield found
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def to_simulated_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """Moves a module's parameters and buffers to the device, in place."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, torch.nn.Parameter(SimulatedTensor(weight.detach()), requires_grad=False))
        for name, x in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, SimulatedTensor(x))
    return module
