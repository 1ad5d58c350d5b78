"""Files written all or nothing, with the umask's access; sizes; errors that help; coded values."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_OTHER = "or choose another folder"
REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: f"free some space {_OTHER}",
    errno.EDQUOT: f"delete files of yours {_OTHER}",
    errno.EFBIG: f"raise the limit of file sizes (ulimit -f) {_OTHER}",
    errno.EACCES: f"allow writing there (chmod) {_OTHER}",
    errno.EPERM: f"allow writing there (chmod) {_OTHER}",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOTDIR: "choose another folder: a file stands in its path",
    errno.EIO: f"check the disk {_OTHER}",
}


_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**k for k, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**k for k, letter in enumerate("KMGT", 1)},
}


def parse_bytes(size: int | str, name: str) -> int:
    """Returns a number of bytes.

    Args:
        size: Bytes, or a number with a unit: ``'500MB'`` (:math:`500 \\cdot 10^6`), ``'2GiB'``
            (:math:`2 \\cdot 2^{30}`), ``'1.5 TiB'``. Small letters will do.
        name: The argument that it was given as, for errors.

    Raises:
        ValueError: When it is no such size, or less than one byte.
    """
    found = None
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    elif isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", size.strip(), re.ASCII)
        unit = None if match is None else _UNITS.get(match[2].upper())
        if match is not None and unit is not None:
            found = int(Fraction(match[1]) * unit)
    if found is None or found < 1:
        raise ValueError(
            f"{name}={size!r} must be a number of bytes of at least 1, or one with a unit (kB, MB, "
            "GB, TB of 1000, KiB, MiB, GiB, TiB of 1024), such as '2GiB'"
        )
    return found


def spoken_bytes(count: float) -> str:
    """Returns a number of bytes with its unit: ``'1.50 GiB'``, ``'12 MiB'``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def check_path(name: str, path: object) -> None:
    """Raises ``TypeError`` on an argument that is no path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"Expected '{name}' to be a path (got {path!r})")


def check_folder(name: str, path: str | os.PathLike[str] | None) -> None:
    """Raises ``ValueError`` where a folder that was given does not exist."""
    if path is not None and not os.path.isdir(path):
        raise ValueError(f"{name}={os.fspath(path)!r} is no folder: make it, or pass another one")


def check_type(name: str, value: object, kind: Any, wanted: str) -> None:
    """Raises ``TypeError`` on an argument of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"Expected '{name}' to be {wanted} (got {type(value).__name__})")


def explained(error: Exception, path: Path) -> Exception:
    """Returns an error of writing as one that names the path that the user gave, and a remedy.

    Returns:
        An ``OSError`` of the same number; ``error`` itself where it has none.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError):
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else None
    if number is None:
        return error
    remedy = REMEDIES.get(number)
    text = os.strerror(number) + (f"; {remedy}" if remedy else "")
    return OSError(number, text, os.fspath(path))


def beside(path: Path) -> Path:
    """Returns an unused hidden name in the same folder, another one at each call."""
    return path.with_name(f".{path.name[:100]}.tmp-{secrets.token_hex(8)}")


def flush(path: Path) -> None:
    """Waits until a file's or a folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file, which the library alone would make readable by its owner only."""
    with path.open("ab") as file:  # Not truncated: a file in its place may be memory mapped.
        mode = os.fstat(file.fileno()).st_mode & 0o777
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


ALIGNMENT = 64
"""Bytes that divide the address of a tensor in PyTorch's own memory."""
_FILLER = "filler."
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def save_aligned(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file to be memory mapped: addresses are multiples of 64 bytes.

    Computing with complex numbers of 16 bytes ends the process at addresses that 16 does not
    divide, and the library aligns to 8. The format has no gaps between tensors: what fills them are
    tensors themselves, which :func:`read_aligned` leaves out.

    Args:
        tensors: On the CPU, contiguous, of the dtypes of a partition file.
        path: The file.
    """
    header: dict[str, Any] = {}
    pieces: list[Tensor] = []
    end = 0
    for name, tensor in tensors.items():
        filler = torch.zeros(-tensor.nbytes % ALIGNMENT, dtype=torch.uint8)
        filled = {name: tensor, f"{_FILLER}{len(header)}": filler}
        for key, piece in filled.items():
            if piece is filler and not filler.numel():
                continue
            code, shape = _CODES[piece.dtype], list(piece.shape)
            places = [end, end + piece.nbytes]
            header[key] = {"dtype": code, "shape": shape, "data_offsets": places}
            pieces.append(piece)
            end = places[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            file.write(piece.detach().reshape(-1).view(torch.uint8).numpy().data)


def read_aligned(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, memory mapped.

    A tensor that is not aligned, as in files of older versions, is a copy.

    Raises:
        SafetensorError: When the file is none.
    """
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if not name.startswith(_FILLER)]  # noqa: SIM118
        found = {name: file.get_tensor(name) for name in names}
    return {name: t if t.data_ptr() % ALIGNMENT == 0 else _copied(t) for name, t in found.items()}


def _copied(tensor: Tensor) -> Tensor:
    """Returns a copy that is made of bytes, which may lie anywhere."""
    copied = tensor.reshape(-1).view(torch.uint8).clone()
    return copied.view(tensor.dtype).view(tensor.shape)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file and puts it in the place of ``path`` in one step.

    Writers of one path don't disturb each other: the last one stays. After an error the previous
    file is as it was, and nothing else is left.

    Args:
        path: The file.
        write: Writes it under the name that it gets.

    Raises:
        OSError: When it can't be written; see :func:`explained`.
    """
    temporary = beside(path)
    try:
        write(temporary)
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise explained(error, path) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


# Python's values as JSON ######################################################
#
# JSON has no tuples, no infinities, and no keys but strings.


def to_json(value: Any) -> Any:
    """Returns a value coded as JSON can hold it.

    Dictionaries and tuples become objects with one key, which names the type. Tensors of one
    element become numbers. What is unknown stays as it is.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    kind = type(value)
    if kind is list:
        return [to_json(item) for item in value]
    if kind is tuple:
        return {"tuple": [to_json(item) for item in value]}
    if kind in (dict, Counter):
        return {kind.__name__: [[to_json(key), to_json(item)] for key, item in value.items()]}
    return value


def from_json(value: Any) -> Any:
    """Returns what :func:`to_json` was given.

    Raises:
        ValueError: When it is something else.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str
    content: Any
    kind, content = next(iter(value.items()), ("", []))
    try:
        if kind == "float":
            return float(content)
        if kind == "tuple":
            return tuple(from_json(item) for item in content)
        pairs = {from_json(key): from_json(item) for key, item in content}
    except TypeError as error:
        raise ValueError(f"{value!r} is no coded value: {error}") from None
    if len(value) != 1 or kind not in ("dict", "Counter"):
        raise ValueError(f"{value!r} is no coded value")
    return Counter(pairs) if kind == "Counter" else pairs
