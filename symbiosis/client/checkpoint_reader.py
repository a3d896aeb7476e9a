"""The tensors of a checkpoint, as transformers' loader takes them: each is read when it is its turn, or not at all if what will be made of it is
known to be the executor's."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from symbiosis.client.known_checkpoints import Made
from symbiosis.transport.fingerprint import digest

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # has transformers read a tensor when it is its turn
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class NotRead(Tensor):
    """A tensor of which only shape and dtype are known, and what is made of such tensors. It is on no device, whichever is asked for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            _, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs or {})
            args, kwargs = (args[0], dtype or args[0].dtype), {}
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class CheckpointReader:
    """Reads files for the loader, one tensor after another, and notes what is made of which.

    >>> import tempfile, torch, safetensors.torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     safetensors.torch.save_file({"a": torch.ones(2)}, f"{folder}/x.safetensors")
    ...     with opened([f"{folder}/x.safetensors"], lambda sources: False) as reader:
    ...         float(reader.tensors["a"][...].sum())
    2.0
    """

    def __init__(self, is_needless: Callable[[str], bool]) -> None:
        self.tensors: dict[str, _TensorPart] = {}
        self._is_needless = is_needless
        self._now, self._is_made, self._whole = Made(), False, True
        self._every: list[Made] = []
        self._ahead: dict[int, tuple[Tensor, Future[str]]] = {}  # by their addresses
        self._pool = ThreadPoolExecutor(thread_name_prefix="symbiosis-digests")

    def add(self, file: Any) -> None:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            self.tensors[name] = _TensorPart(self, name, file.get_slice(name))

    def look_ahead(self, is_wanted: Callable[[Tensor], bool]) -> None:
        """Begin to take digests of what will be read, on all cores, where it is mapped: that may be what weights are made of as it is."""
        for name, part in self.tensors.items():
            if not self._is_needless(name) and is_wanted(tensor := part.part[...]):
                self._ahead[tensor.data_ptr()] = tensor, self._pool.submit(digest, tensor)

    def digest(self, weight: Tensor) -> str:
        """Return the digest of a weight that the loader has made of what it has read."""
        seen, known = self._ahead.get(weight.data_ptr(), (None, None))
        if (
            seen is None
            or known is None
            or (seen.dtype, seen.shape, seen.stride()) != (weight.dtype, weight.shape, weight.stride())
        ):
            return digest(weight)
        return known.result()

    def close(self) -> None:
        """Stop looking ahead."""
        self._pool.shutdown(cancel_futures=True)

    def read(self, name: str, part: Any) -> Tensor:
        if self._is_made:
            self._next()
        self._now.sources.append(name)
        dtype = DTYPES.get(part.get_dtype())
        if dtype is not None and self._is_needless(name):
            return torch.empty(part.get_shape(), dtype=dtype, device="meta").as_subclass(NotRead)
        return part[...]  # type: ignore[no-any-return]

    def note(self, weight: str, digest: str | None, phase: int = 0) -> None:
        """Note that this weight was made of what was read since the last ones; None if its digest is not known. The phase counts for what is
        the client's own."""
        self._is_made = True
        if digest is None:
            self._whole = False
        else:
            self._now.digests[weight], self._now.phases[weight] = digest, phase

    def made(self) -> list[Made]:
        """Return what was made of which tensors, as far as all digests of it are known."""
        self._next()
        return self._every

    def _next(self) -> None:
        if self._whole and self._now.sources and self._now.digests:
            self._every.append(self._now)
        self._now, self._is_made, self._whole = Made(), False, True


class _TensorPart:
    """A tensor in a file, which is read where the loader takes `part[...]`."""

    def __init__(self, reader: CheckpointReader, name: str, part: Any) -> None:
        self._reader, self._name, self.part = reader, name, part

    def __getitem__(self, _: Any) -> Tensor:
        return self._reader.read(self._name, self.part)


@contextmanager
def opened(files: Sequence[str], is_needless: Callable[[str], bool]) -> Iterator[CheckpointReader]:
    """Open safetensors files, and have the loader read in the order of its work, in the block."""
    reader, before = CheckpointReader(is_needless), os.environ.get(ONE_BY_ONE)
    with ExitStack() as stack:
        stack.callback(reader.close)
        for file in files:
            reader.add(stack.enter_context(safe_open(file, framework="pt")))
        os.environ[ONE_BY_ONE] = "1"
        try:
            yield reader
        finally:
            os.environ.pop(ONE_BY_ONE)
            if before is not None:
                os.environ[ONE_BY_ONE] = before
