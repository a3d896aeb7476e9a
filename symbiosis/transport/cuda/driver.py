"""The parts of the CUDA driver that torch does not offer: memory that other processes can map, host words that a GPU reads and writes, and
stream memory operations on them. It uses ctypes, so that importing it initialises no CUDA and needs no other package.

Device memory is made by `cuMemCreate` and passed as a file descriptor, like a memfd of the host. The allocation lives until the last process
that maps it is gone, whichever process made it.
"""

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from symbiosis.transport.tensors import TORCH_DTYPE

HIGHEST = -5  # the priority of a stream; if the GPU has fewer, its highest

_POSIX_FD, _PINNED, _ON_DEVICE, _READ, _READ_WRITE = 1, 1, 1, 1, 3
_PORTABLE_MAPPED = 3
_CAN_USE_STREAM_MEM_OPS, _CAN_SHARE_BY_FD, _IS_SERVED_BY_MPS = 122, 103, 133
_HAS_ATOMICS = 3  # of a pair of devices
_WAIT, _WRITE, _AT_LEAST, _EQUAL, _AS_IT_IS = 1, 2, 0, 1, 0
WAIT_EQUAL, WAIT_AT_LEAST, WRITE_32 = (_WAIT, _EQUAL), (_WAIT, _AT_LEAST), (_WRITE, _AS_IT_IS)
_NON_BLOCKING = 1
_NO_CONTEXT = 201
_HANDLE_BYTES, _BY_PEERS = 64, 1


class CudaError(RuntimeError):
    """The driver refused."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams, as far as waiting and writing use it."""

    _fields_ = [
        ("operation", ctypes.c_int), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64), ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64), ("rest", ctypes.c_uint64),
    ]  # fmt: skip


class _Handle(ctypes.Structure):
    """CUipcMemHandle"""

    _fields_ = [("bytes", ctypes.c_ubyte * _HANDLE_BYTES)]


class MemOp(NamedTuple):
    """Wait until the 32-bit word at `address` is `value` (or not less), or write `value` there."""

    kind: tuple[int, int]
    address: int
    value: int


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    # with these, ctypes converts the arguments by itself, which is faster; for some calls this copy is all there is to do
    driver.cuMemcpyAsync.argtypes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    return driver


def check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise CudaError(f"{what}: {(name.value or b'error').decode()} ({code})")


def why_not(device: torch.device) -> str | None:
    """Return why `device` cannot take part in calls that no CPU waits for, or None if it can."""
    try:
        torch.cuda.init()
        number = _device(device)
        for attribute, what in (
            (_CAN_USE_STREAM_MEM_OPS, "has no stream memory operations"),
            (_CAN_SHARE_BY_FD, "cannot share memory by file descriptors"),
        ):
            if not _attribute(attribute, number):
                return f"{device} {what}"
    except (OSError, RuntimeError, AttributeError) as error:
        return f"{device} cannot be used: {error}"
    return None


def shares_time(device: torch.device) -> bool:
    """Whether this process takes turns with others on an initialised device, which it does unless the driver says that MPS serves it."""
    try:
        return not _attribute(_IS_SERVED_BY_MPS, _device(device))
    except CudaError:
        return True


def device_name(device: torch.device) -> str:
    """Return a name of the GPU that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def has_atomics(device: torch.device, other: int) -> bool:
    """Whether `device` makes atomic operations in the memory of another one, as kernels do that answer calls. PCIe alone has none."""
    value = ctypes.c_int()
    code = _driver().cuDeviceGetP2PAttribute(ctypes.byref(value), _HAS_ATOMICS, _device(device), other)
    return not code and bool(value.value)


def _attribute(attribute: int, device: int) -> int:
    value = ctypes.c_int()
    check(_driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute")
    return value.value


def _device(device: torch.device) -> int:
    """Return the driver's number of a device. It is torch's, since both honour CUDA_VISIBLE_DEVICES."""
    return torch.cuda.current_device() if device.index is None else device.index


# ---------------------------------------------------------------- device memory


class DeviceMemory:
    """An allocation of its own on one device, mapped for use by that device or by another."""

    def __init__(self, handle: int, nbytes: int, user: torch.device, address: int = 0, read_only: bool = False) -> None:
        """`address` is given if the memory is mapped there already; then it is not unmapped here."""
        self._handle, self.nbytes, self.user, self.is_ours = ctypes.c_uint64(handle), nbytes, user, not address
        try:
            self.address = address or self._map(_READ if read_only else _READ_WRITE)
        except CudaError:
            _driver().cuMemRelease(self._handle)
            raise

    def _map(self, access: int) -> int:
        nbytes, address = self.nbytes, ctypes.c_uint64()
        check(_driver().cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)), "cuMemAddressReserve")  # fmt: skip
        try:
            check(_driver().cuMemMap(address, ctypes.c_size_t(nbytes), ctypes.c_size_t(0), self._handle, ctypes.c_ulonglong(0)), "cuMemMap")  # fmt: skip
            self._set_access(address.value, access)
        except CudaError:
            self._unmap(address.value)
            raise
        return address.value

    def _set_access(self, address: int, flags: int) -> None:
        access = _Access(_Location(_ON_DEVICE, _device(self.user)), flags)
        check(_driver().cuMemSetAccess(ctypes.c_uint64(address), ctypes.c_size_t(self.nbytes), ctypes.byref(access), ctypes.c_size_t(1)), "cuMemSetAccess")  # fmt: skip

    def protect(self) -> None:
        """Let this process, too, only read the memory from now on."""
        self._set_access(self.address, _READ)

    def _unmap(self, address: int) -> None:
        _driver().cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(self.nbytes))
        _driver().cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(self.nbytes))

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> "DeviceMemory":
        nbytes = whole(nbytes, device)
        return cls(created(nbytes, device), nbytes, device)

    @classmethod
    def of_fd(cls, fd: int, nbytes: int, user: torch.device, read_only: bool = False) -> "DeviceMemory":
        """Map memory that another process made, for use by our device."""
        return cls(imported(fd), nbytes, user, read_only=read_only)

    @classmethod
    def at(cls, address: int, nbytes: int, user: torch.device) -> "DeviceMemory":
        """Return the allocation of this process that begins at `address`. Raises `CudaError` if it was made in a way that lets no other
        process map it."""
        handle = ctypes.c_uint64()
        check(_driver().cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)), "cuMemRetainAllocationHandle")  # fmt: skip
        return cls(handle.value, nbytes, user, address)

    def fd(self) -> int:
        """Return a descriptor by which others can map the memory. The caller closes it."""
        return exported(self._handle.value)

    def tensor(self, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor that lies at byte `start`."""
        kind = TORCH_DTYPE[dtype]
        nbytes = prod(shape) * kind.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=kind, device=self.user)
        assert start + nbytes <= self.nbytes
        array = _Array(self, self.address + start, nbytes)
        return torch.as_tensor(array, device=self.user).view(kind).view(shape)

    def unmapped(self) -> int:
        """Unmap the memory, and return its handle, which keeps it. The caller releases that."""
        self._unmap(self.address)
        self.address = 0
        return self._handle.value

    def close(self) -> None:
        """Unmap and release the memory. Nothing may use it any more."""
        if self.address and self.is_ours:
            self._unmap(self.address)
        if self.address:
            _driver().cuMemRelease(self._handle)
            self.address = 0


class NamedMemory:
    """Zeros on a device, which processes of this host that hear its `name` read and write, from other GPUs as well. They lie there until this is closed."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        enter(device)
        address, handle = ctypes.c_uint64(), _Handle()
        check(_driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)), "cuMemAlloc")
        self.address, self._opened, self._device = address.value, list[int](), device
        try:
            check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), address), "cuIpcGetMemHandle")
            check(_driver().cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes)), "cuMemsetD8")
        except CudaError:
            self.close()
            raise
        self.name = bytes(handle.bytes)

    def other(self, name: bytes) -> int:
        """Return the address of another process's memory. It is unmapped with this one."""
        enter(self._device)
        address, handle = ctypes.c_uint64(), _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*name))
        check(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, _BY_PEERS), "cuIpcOpenMemHandle")
        self._opened.append(address.value)
        return address.value

    def close(self) -> None:
        """Unmap and free all, once the device has done what it was told."""
        if not self.address:
            return
        enter(self._device)
        torch.cuda.synchronize(self._device)
        for address in self._opened:
            _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
        _driver().cuMemFree_v2(ctypes.c_uint64(self.address))
        self.address = 0


class DeviceRange(DeviceMemory):
    """Several allocations, of one device or of several, which are mapped read-only one behind the other for use by one device."""

    def __init__(self, pieces: Sequence[tuple[int, int]], user: torch.device) -> None:
        """`pieces`: handles and sizes of the allocations. The handles are released with the range."""
        self._handles, self.nbytes, self.user = [handle for handle, _ in pieces], sum(n for _, n in pieces), user
        self.address, self.is_ours, self._sizes = 0, True, [nbytes for _, nbytes in pieces]
        address = ctypes.c_uint64()
        check(_driver().cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t(self.nbytes), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)), "cuMemAddressReserve")  # fmt: skip
        at = address.value
        for handle, nbytes in pieces:
            check(_driver().cuMemMap(ctypes.c_uint64(at), ctypes.c_size_t(nbytes), ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_ulonglong(0)), "cuMemMap")  # fmt: skip
            at += nbytes
        self.address = address.value
        self._set_access(self.address, _READ)

    def close(self) -> None:
        """Unmap and release the memory. Nothing may use it any more."""
        if not self.address:
            return
        at = self.address
        for nbytes in self._sizes:  # each mapping by itself
            _driver().cuMemUnmap(ctypes.c_uint64(at), ctypes.c_size_t(nbytes))
            at += nbytes
        _driver().cuMemAddressFree(ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
        for handle in self._handles:
            _driver().cuMemRelease(ctypes.c_uint64(handle))
        self.address = 0


def created(nbytes: int, device: torch.device) -> int:
    """Make an allocation that others can map, and return its handle. It is mapped nowhere yet."""
    properties, handle = _Allocation(_PINNED, _POSIX_FD, _Location(_ON_DEVICE, _device(device))), ctypes.c_uint64()
    check(_driver().cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(properties), ctypes.c_ulonglong(0)), "cuMemCreate")  # fmt: skip
    return handle.value


def imported(fd: int) -> int:
    """Return a handle of the allocation behind a descriptor."""
    handle = ctypes.c_uint64()
    check(_driver().cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(fd), _POSIX_FD), "cuMemImportFromShareableHandle")  # fmt: skip
    return handle.value


def exported(handle: int) -> int:
    """Return a descriptor of an allocation that this process has made; CUDA refuses others. The caller closes it."""
    fd = ctypes.c_int(-1)
    check(_driver().cuMemExportToShareableHandle(ctypes.byref(fd), ctypes.c_uint64(handle), _POSIX_FD, ctypes.c_ulonglong(0)), "cuMemExportToShareableHandle")  # fmt: skip
    return fd.value


def whole(nbytes: int, device: torch.device) -> int:
    """Return the size of an allocation that has room for so many bytes."""
    properties, size = _Allocation(_PINNED, _POSIX_FD, _Location(_ON_DEVICE, _device(device))), ctypes.c_size_t()
    check(_driver().cuMemGetAllocationGranularity(ctypes.byref(size), ctypes.byref(properties), 0), "cuMemGetAllocationGranularity")  # fmt: skip
    return -(-nbytes // size.value) * size.value


def allocation(address: int) -> tuple[int, int] | None:
    """Return the beginning and the size of the device memory in which `address` lies, or None if there is none."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    found = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address))
    return None if found else (base.value, nbytes.value)


class _Array:
    """Bytes at an address, in the form that torch takes. It keeps their owner alive."""

    def __init__(self, owner: DeviceMemory, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


# ---------------------------------------------------------------- host memory


class PinnedMemory:
    """Host memory that is pinned, and that GPUs know by `address`: they copy from and to it without a CPU's help.

    It stays mapped until it is closed, even if nothing refers to it. Otherwise whatever is mapped there next would count as pinned already.
    """

    _mapped: ClassVar[dict[int, mmap.mmap]] = {}

    def __init__(self, memory: mmap.mmap) -> None:
        self._host = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        check(_driver().cuMemHostRegister_v2(self._host, ctypes.c_size_t(len(memory)), _PORTABLE_MAPPED), "cuMemHostRegister")  # fmt: skip
        self._mapped[self._host.value or 0] = memory
        address = ctypes.c_uint64()
        check(_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(address), self._host, 0), "cuMemHostGetDevicePointer")
        self.address: int = address.value

    def close(self) -> None:
        """Unpin the memory. No stream may use it any more."""
        if self.address:
            self.address = 0
            check(_driver().cuMemHostUnregister(self._host), "cuMemHostUnregister")
            del self._mapped[self._host.value or 0]


class WordPage:
    """A page of host memory that processes and GPUs share, as 32-bit words."""

    nbytes = 4096

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, self.nbytes)
        self.words = memoryview(self.memory).cast("I")
        self._pinned = PinnedMemory(self.memory)

    def at(self, index: int) -> int:
        """Return the address by which a GPU knows the word at this index."""
        return self._pinned.address + 4 * index

    def close(self) -> None:
        """Unpin the page. No stream may use it any more."""
        self._pinned.close()


# ---------------------------------------------------------------- streams


class MemOps:
    """Stream memory operations that are enqueued together, any number of times."""

    def __init__(self, ops: Sequence[MemOp]) -> None:
        self._ops = (_MemOp * len(ops))(
            *(_MemOp(operation, address, value, flags) for (operation, flags), address, value in ops)
        )
        self._count = ctypes.c_uint(len(ops))
        self._none = ctypes.c_uint(0)
        self._enqueue = _driver().cuStreamBatchMemOp_v2

    def enqueue(self, stream: int) -> None:
        """Enqueue them on `stream` (a `cudaStream_t`)."""
        code = self._enqueue(ctypes.c_void_p(stream), self._count, self._ops, self._none)
        if code:
            check(code, "cuStreamBatchMemOp")


def fill(address: int, nbytes: int, value: int, stream: int) -> None:
    """Set every byte there to `value`."""
    check(_driver().cuMemsetD8Async(ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)), "cuMemsetD8Async")  # fmt: skip


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy between any two addresses of the unified address space."""
    code = _driver().cuMemcpyAsync(target, source, nbytes, stream)
    if code == _NO_CONTEXT:
        torch.cuda.current_stream().query()  # which makes the device's context this thread's
        code = _driver().cuMemcpyAsync(target, source, nbytes, stream)
    if code:
        check(code, "cuMemcpyAsync")


def enter(device: torch.device) -> None:
    """Make the device's context this thread's, without which the driver refuses."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.ExternalStream:
    """Return a stream of our own, while torch hands out the same 32 again and again. It is never destroyed."""
    stream = ctypes.c_void_p()
    enter(device)
    with torch.cuda.device(device):
        made = _driver().cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, priority)
        check(made, "cuStreamCreateWithPriority")
    return torch.cuda.ExternalStream(stream.value, device)
