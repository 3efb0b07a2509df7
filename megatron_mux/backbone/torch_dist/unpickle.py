"""Reads pickles of Megatron checkpoints without running any code that they name.

A pickle names classes and functions to call. Here none is imported: a few that build plain values are replaced by ours,
objects of Megatron's and torch's classes become inert `Record`s, and anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch

from megatron_mux.errors import UserError

_SMALL = 64 << 20
"""Most bytes of the pickle in an archive of `torch.save`: tensors are stored beside it."""


class Record:
    """An object of a class that is not imported: it has the attributes that were pickled, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class PickledTensor(NamedTuple):
    """Where a pickled tensor's values are: `key` names a storage in the archive."""

    key: str
    dtype: torch.dtype | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(storage: tuple[str, torch.dtype | None], offset: int, shape: Any, stride: Any, *_: Any) -> Any:
    return PickledTensor(*storage, offset, tuple(shape), tuple(stride))


def _nothing(*_: Any) -> Record:
    return Record()


def _empty() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _set(values: Sequence[Any] = ()) -> set[Any]:
    _check_keys(values)
    return set(values)


def _check_keys(keys: Sequence[Any]) -> None:
    """Refuse what Megatron has no use for: to hash deeply nested tuples would end the process."""
    for key in keys:
        if isinstance(key, tuple | frozenset):
            raise ValueError(f"a {type(key).__name__} is a key")


_BUILT: dict[tuple[str, str], Any] = {("torch._utils", "_rebuild_tensor_v2"): _tensor}
_BUILT |= {("collections", "OrderedDict"): _empty, ("builtins", "dict"): _empty}
_BUILT |= {("torch._utils", "_rebuild_parameter"): lambda data, *_: data, ("torch", "Size"): tuple}
_BUILT |= {("builtins", kind.__name__): kind for kind in (list, tuple, int, float, bool, str)}
_BUILT |= {("builtins", "set"): _set}
_BUILT |= {("torch.serialization", "_get_layout"): _nothing}

# Classes whose objects have attributes, or are told apart by what they are made of (enums, paths, arrays).
_RECORDS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "pathlib": "Path PosixPath PurePosixPath",
        "pathlib._local": "Path PosixPath PurePosixPath",
        "signal": "Signals",
        "io": "BytesIO",
        "_io": "BytesIO",
        "numpy": "dtype ndarray",
        "numpy.dtypes": "UInt32DType",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "_codecs": "encode",
        "torch": "Generator device",
        "torch._C": "Generator",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
        "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
        "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
        "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    }.items()
    for name in names.split()
)
_PACKAGES = ("megatron.", "transformer_engine.")

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}


class _Unpickler(pickle._Unpickler):
    """The one in Python: the faster one makes room for as many objects as a file says it has."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # as protocol 2 spells it
        full = f"{module}.{name}"
        if (module, name) in _BUILT:
            return _BUILT[module, name]
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if full in _RECORDS or full.startswith(_PACKAGES):
            return type(name, (Record,), {})
        raise UserError(
            f"{self._where} holds a pickled {full}, which no Megatron checkpoint needs: it could run any code, and is "
            "not read."
        )

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype | None]:
        """A storage of an archive: `("storage", type, key, device, count)`."""
        return str(pid[2]), _STORAGES.get(pid[1])


def _checked(opcode: bytes, keys: Callable[[list[Any]], Sequence[Any]]) -> None:
    """Let `opcode`, which makes keys of what it finds on the stack, look at them first."""
    load = _Unpickler.dispatch[opcode[0]]

    def checked(unpickler: Any) -> None:
        _check_keys(keys(unpickler.stack))
        load(unpickler)

    _Unpickler.dispatch[opcode[0]] = checked


_checked(pickle.SETITEM, lambda stack: stack[-2:-1])
for _opcode in (pickle.SETITEMS, pickle.DICT):
    _checked(_opcode, lambda stack: stack[::2])
for _opcode in (pickle.ADDITEMS, pickle.FROZENSET):
    _checked(_opcode, lambda stack: stack)


def unpickle(file: BinaryIO, where: str) -> Any:
    """What a pickle holds, objects as `Record`s.

    Args:
        file: Open at the pickle.
        where: Name of the file, for messages.

    Raises:
        UserError: It is damaged, or names a class or function that does not belong there.
    """
    try:
        return _Unpickler(file, where).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise UserError(f"{where} cannot be read: {error}.") from None


class Archive:
    """What `torch.save` wrote: a pickle, and the values of its tensors as they are.

    Args:
        file: Holds it, maybe among others.
        start, length: Its bytes there.
        where: Name of the file, for messages.

    Raises:
        UserError: It is damaged, or its pickle is refused.

    Attributes:
        content: Tensors are `PickledTensor`s.
    """

    def __init__(self, file: BinaryIO, start: int, length: int, where: str) -> None:
        self._file, self._start = file, start
        try:
            # zipfile wants a file of its own
            with zipfile.ZipFile(_Part(file, start, length)) as archive:
                entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
                if entries["data.pkl"].file_size > _SMALL:
                    raise ValueError("its pickle is too large")
                self._entries = entries
                self.content = unpickle(io.BytesIO(archive.read(entries["data.pkl"])), where)
        except zipfile.BadZipFile:
            raise UserError(f"{where} is cut or damaged: the checkpoint is incomplete.") from None
        except (KeyError, ValueError, OSError) as error:
            raise UserError(f"{where} cannot be read: {error}.") from None

    def position(self, key: str) -> tuple[int, int]:
        """Where in the file the values of a storage begin, and how many bytes they are.

        Raises:
            ValueError: It is missing or compressed.
        """
        entry = self._entries.get(f"data/{key}")
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"its values {key} are missing or compressed")
        self._file.seek(self._start + entry.header_offset)
        header = self._file.read(30)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return self._start + entry.header_offset + len(header) + lengths, entry.file_size


class _Part(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(0, self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def attributes(value: Any) -> Mapping[str, Any]:
    """The attributes of a `Record`, or the items of a dict; empty for anything else."""
    return value if isinstance(value, dict) else vars(value) if isinstance(value, Record) else {}
