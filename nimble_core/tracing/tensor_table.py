"""Which tensor of a run is which window (slot) of which memory (storage)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from nimble_core.ir.program import Role, Storage, TensorRef
from nimble_core.torch_compat.members import FREE_WEAK_STORAGE
from nimble_core.tracing.operator_traits import Shown, has_memory, shown_by, storage_address
from nimble_core.tracing.recording import Slot
from nimble_core.utils.errors import CaptureError

__all__ = ["TensorTable"]

_WITHOUT_TENSORS = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Types of most arguments: they need no look inside."""


class TensorTable:
    """Slots and storages of one recording, in the order in which the run shows them.

    Attributes:
        names: role and name of the model's own tensors, by address of their storage.
        storages: every storage seen, by index.
        storage_of: storage of each slot.
        refs: window of each slot.
        given: tensors that no call made, by slot, as aliases: parameters, buffers, inputs, constants.
        owners: the same tensors themselves, which keeps them alive.
        made: storages that operators made.
        constant: storages whose values do not depend on inputs.
        written: storages that calls have written.
    """

    def __init__(self) -> None:
        self.names: dict[int, tuple[Role, str]] = {}
        self.storages: list[Storage] = []
        self.storage_of: list[int] = []
        self.refs: list[TensorRef] = []
        self.given: dict[int, torch.Tensor] = {}
        self.owners: dict[int, torch.Tensor] = {}
        self.made: set[int] = set()
        self.constant: set[int] = set()
        self.written: set[int] = set()
        self._addresses = _HeldAddresses()
        self._index_of: dict[int, int] = {}  # storage by address
        # By id(tensor), which names that tensor only while its weak reference is alive.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Shown]] = {}
        self._slot_of_window: dict[Shown, int] = {}

    # -- storages ----------------------------------------------------------------------------------------------

    def add_storage(self, storage: Storage) -> int:
        """Add a storage; returns its index."""
        self.storages.append(storage)
        return len(self.storages) - 1

    def storage(self, tensor: torch.Tensor, address: int | None = None) -> int:
        """Return the storage behind ``tensor``, which is added if it is new."""
        if address is None:
            address = storage_address(tensor)
        index = self._index_of.get(address)
        if index is None:
            storage = tensor.untyped_storage()
            role, name = self.names.get(address, ("intermediate", ""))
            index = self.add_storage(Storage(storage.nbytes(), role, name))
            if role != "intermediate":
                self.constant.add(index)
            self._index_of[address] = index
            self._addresses.hold(storage)
        return index

    def known_storage(self, tensor: torch.Tensor) -> int | None:
        """Return the storage behind ``tensor`` if the run has shown it."""
        return self._index_of.get(storage_address(tensor))

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether every run finds the values that ``tensor`` has now."""
        if not has_memory(tensor):
            return False
        if self.known_storage(tensor) is None:
            self.slot(tensor)  # the model's own, seen for the first time
        return self.storage(tensor) in self.constant

    def forget(self, storage: int) -> None:
        """Treat the tensors on ``storage`` as new ones from now on."""
        slots = {slot for slot, home in enumerate(self.storage_of) if home == storage}
        self._index_of = {address: index for address, index in self._index_of.items() if index != storage}
        self._slot_of_window = {window: slot for window, slot in self._slot_of_window.items() if slot not in slots}
        self._known = {key: known for key, known in self._known.items() if known[1] not in slots}

    def release_addresses(self) -> None:
        """Let the memory that the run has used be freed entirely."""
        self._addresses.release()

    # -- slots -------------------------------------------------------------------------------------------------

    def slot_of(self, tensor: torch.Tensor) -> int | None:
        """Return the slot of this very tensor, if it has one."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def slot_showing(self, window: Shown) -> int | None:
        """Return the slot that shows ``window``, if there is one."""
        return self._slot_of_window.get(window)

    def slot(self, tensor: torch.Tensor) -> int:
        """Return the slot of a tensor; one that no call made becomes a given one and is kept alive."""
        known = self._known.get(id(tensor))
        if known is not None:
            reference, slot, (home, offset, shape, stride, dtype, conjugate, _) = known
            # Compared piece by piece, since all arguments of all calls pass here: `y.data = z` makes y show z's window,
            # and no dispatch mode sees that.
            if (
                tensor.untyped_storage()._cdata == home
                and tensor.storage_offset() == offset
                and tensor.shape == shape
                and tensor.stride() == stride
                and tensor.dtype is dtype
                and (conjugate is None or tensor.is_conj() is conjugate)
                and reference() is tensor
            ):
                return slot
        # Autograd also hands what it saved to the backward as another tensor that shows the same window.
        window = shown_by(tensor)
        shown = self._slot_of_window.get(window)
        return self.give(tensor, window=window) if shown is None else self.bind(tensor, shown)

    def bind(self, tensor: torch.Tensor, slot: int) -> int:
        """Let ``tensor`` be found under a slot that exists; returns that slot."""
        self._known[id(tensor)] = weakref.ref(tensor), slot, shown_by(tensor)
        return slot

    def new_slot(self, tensor: torch.Tensor, window: Shown | None = None) -> int:
        """Add a slot for what a call or a host step has made."""
        slot, window = len(self.storage_of), window or shown_by(tensor)
        ref = self.ref(tensor, window)
        self.storage_of.append(ref.storage)
        self.refs.append(ref)
        self._known[id(tensor)] = weakref.ref(tensor), slot, window
        self._slot_of_window[window] = slot
        return slot

    def give(self, tensor: torch.Tensor, role: Role | None = None, name: str = "", window: Shown | None = None) -> int:
        """Add a slot for a tensor that no call made: an input, or by default the model's own or a constant.

        Raises:
            CaptureError: its memory was made by a recorded call, so that something has happened unseen.
        """
        window = window or shown_by(tensor)
        home = self._index_of.get(window[0])
        slot = self.new_slot(tensor, window)
        storage = self.storage_of[slot]
        if home in self.made:
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} came about out of sight, on memory of a recorded call",
                fix="report this model",
            )
        if role == "input":
            self.constant.discard(storage)
        if role and home is None:
            self.storages[storage] = Storage(self.storages[storage].nbytes, role, name)
        elif self.storages[storage].role == "intermediate":  # known or not: a kernel launch looks at its memory first
            self.storages[storage] = Storage(self.storages[storage].nbytes, "constant", name)
            self.constant.add(storage)
        self.given[slot] = tensor.detach()
        self.owners[slot] = tensor
        return slot

    def live(self, slot: int) -> torch.Tensor:
        """Return the given tensor as an alias that shares its version counter, which aliases made in a mode do not."""
        tensor, alias = self.given[slot], self.owners[slot].detach()
        same = (alias.data_ptr(), alias.shape, alias.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
        return alias if same else tensor

    # -- windows and templates ---------------------------------------------------------------------------------

    def ref(self, tensor: torch.Tensor, window: Shown | None = None) -> TensorRef:
        """Return the window of a tensor."""
        home, offset, shape, stride, dtype, _, _ = window or shown_by(tensor)
        storage, itemsize = self.storage(tensor, home), dtype.itemsize
        return TensorRef(storage, offset * itemsize, tuple(shape), stride, _dtype_name(dtype), itemsize)

    def written_ref(self, tensor: torch.Tensor) -> TensorRef:
        """Return the window of what was just written; an ``out=`` argument may have been resized, as in a replay."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return self.ref(tensor)
        reference, slot, before = known
        window = shown_by(tensor)
        if window != before:
            if self._slot_of_window.get(before) == slot:
                del self._slot_of_window[before]
            self._known[id(tensor)] = reference, slot, window
            self._slot_of_window[window] = slot
            self.refs[slot] = self.ref(tensor, window)
        return self.refs[slot]

    def template(self, arg: Any, reads: list[int]) -> Any:
        """Return ``arg`` with slots in place of its tensors, which are added to ``reads``."""
        if isinstance(arg, torch.Tensor):
            slot = self.slot(arg)
            reads.append(slot)
            return Slot(slot)
        if isinstance(arg, (list, tuple)):
            kind = type(arg)
            return kind(self.templates(arg, reads)) if kind in (list, tuple) else list(arg)
        return arg

    def templates(self, args: Iterable[Any], reads: list[int]) -> list[Any]:
        """Return ``template`` of each of ``args``."""
        return [arg if type(arg) in _WITHOUT_TENSORS else self.template(arg, reads) for arg in args]


class _HeldAddresses:
    """Keeps the addresses of storages from being used again, but not their memory.

    Weak references as plain numbers: thousands of ``StorageWeakRef`` would be as many Python objects.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._free: Any = FREE_WEAK_STORAGE.require()  # torch's names are gone before the last objects are

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Hold an address from now on."""
        self._held.append(storage._weak_ref())

    def release(self) -> None:
        """Free all: takes milliseconds for thousands, and an interrupt in ``__del__`` would be lost."""
        while self._held:
            self._free(self._held.pop())

    def __del__(self) -> None:
        self.release()


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
