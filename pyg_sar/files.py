"""Files written all or nothing, with the umask's access; sizes; errors that help; coded values."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
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
    """Returns a number of bytes, which may be given with a unit: ``'500MB'``, ``'2GiB'``.

    ``name`` is the argument that it was given as, for errors.
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


def check_argument(fits: bool, name: str, value: object, wanted: str) -> None:
    """Raises ``ValueError`` on an argument that does not fit."""
    if not fits:
        raise ValueError(f"Expected '{name}' to be {wanted} (got {value!r})")


def check_whole(name: str, value: object, least: int = 1, *, optional: bool = False) -> None:
    """Raises ``ValueError`` unless an argument is an integer, or ``None`` where it is optional."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    wanted = f"an integer of at least {least}" + (" or None" if optional else "")
    check_argument(whole or (optional and value is None), name, value, wanted)


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
_CODES = {"bool": "BOOL", "uint": "U", "int": "I", "float": "F", "bfloat": "BF"}
"""How the format calls kinds of numbers, whose bits follow: ``I64``."""


def save_aligned(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file to be memory mapped: addresses are multiples of 64 bytes.

    Computing with complex numbers of 16 bytes ends the process at addresses that 16 does not
    divide, and the library aligns to 8. The format has no gaps between tensors: what fills them are
    tensors themselves, which :func:`read_aligned` leaves out.
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
            kind = str(piece.dtype).removeprefix("torch.").rstrip("0123456789")
            bits = "" if kind == "bool" else 8 * piece.itemsize
            places = [end, end + piece.nbytes]
            header[key] = {
                "dtype": f"{_CODES[kind]}{bits}",
                "shape": list(piece.shape),
                "data_offsets": places,
            }
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

    A tensor that is not aligned, as in files of another program, is a copy.
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

    ``write`` writes it under the name that it gets. Writers of one path don't disturb each other:
    the last one stays. After an error, an ``OSError`` that :func:`explained` made, the previous
    file is as it was, and nothing else is left.
    """
    try:
        with TemporaryFolder.beside(path) as folder:
            temporary = folder / "file"
            write(temporary)
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise explained(error, path) from error


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises ``OSError`` on a FIFO or a device, which a reader would wait for; links are followed.

    A folder passes: opening it is an error by itself.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "no regular file (a FIFO or a device)", os.fspath(path))


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path) -> str:
    """Returns a regular file's text."""
    check_regular(path)
    return path.read_text(encoding="utf-8")


# Temporary folders ############################################################
#
# [Note: temporary folders] What has no place yet, or is needed while a process runs only, lies in a
# folder whose name nobody can foretell and which its owner alone may enter. The process holds a
# lock (flock) on it, which the system gives up however the process ends. Who makes such a folder
# first removes those beside it that nobody locks: killed processes left them. Removed is only what
# has such a name, is this user's, is a folder and no link, and holds the marker, or nothing. Where
# the file system has no such locks nothing is removed.

MARKER = ".pyg_sar"
_REPLACED = "replaced"
_TEMPORARY = re.compile(r"(?:pyg_sar-[a-z]+-|\.(.{1,100})\.tmp-)[0-9a-f]{16}", re.DOTALL)


class TemporaryFolder:
    """A new folder that is removed at the end, or by the next process if this one is killed.

    ``path`` is the folder; ``close()`` removes it, at the latest when the object or the process
    ends.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        remove_leftovers(parent)
        while True:
            self.path = parent / f"{prefix}{secrets.token_hex(8)}"
            self.path.mkdir(0o700)
            found = lock_folder(self.path)  # None: it was taken for a leftover just now.
            if found is not None:
                break
        self.close = weakref.finalize(self, _close, self.path, found[0], os.getpid())
        (self.path / MARKER).touch()

    @classmethod
    def beside(cls, path: Path) -> TemporaryFolder:
        """Makes one on the file system of ``path``, from where a rename leads there."""
        return cls(f".{path.name[:100]}.tmp-", path.parent)

    def replace_folder(self, new: Path, place: Path) -> Path:
        """Puts a folder of this one in the place of another, and returns where that is now."""
        old = self.path / _REPLACED
        place.rename(old)
        try:
            new.rename(place)
        except BaseException:
            old.rename(place)
            raise
        return old

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(path: Path, descriptor: int, process: int) -> None:
    with suppress(OSError):
        if os.getpid() == process:  # Not in a process that was forked.
            remove_folder(path, descriptor)
    with suppress(OSError):
        os.close(descriptor)


def lock_folder(path: Path) -> tuple[int, bool] | None:
    """Opens a folder of this user's, which is no link, and locks it.

    Returns a descriptor, and if it has the lock, as long as it is open, which not all file systems
    know; ``None`` where another process has the lock, or the folder is gone.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise OSError(errno.EPERM, "another user's folder", os.fspath(path))
        locked = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:
            locked = False
        if not _is_at(path, descriptor):
            return None
        stack.pop_all()
    return descriptor, locked


def _is_at(path: Path, descriptor: int) -> bool:
    """Says if an open folder still has this name."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_folder(path: Path, descriptor: int) -> None:
    """Removes an open folder and what is in it, whatever has its name by now."""
    empty_folder(descriptor)
    if _is_at(path, descriptor):
        path.rmdir()


def empty_folder(descriptor: int) -> None:
    """Removes what is in an open folder."""
    # The marker goes last: what is left of it if this process is killed here is known by it.
    for name in sorted(os.listdir(descriptor), key=lambda name: name == MARKER):
        mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes have left in a folder. See [Note: temporary folders]."""
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(parent)
    for match in filter(None, map(_TEMPORARY.fullmatch, names)):
        with suppress(OSError):
            path = parent / match[0]
            found = lock_folder(path)
            if found is None:
                continue
            descriptor, locked = found
            try:
                held = os.listdir(descriptor)
                if not locked or (held and MARKER not in held):
                    continue
                if match[1] and _REPLACED in held and not os.path.lexists(parent / match[1]):
                    (path / _REPLACED).rename(parent / match[1])  # It was killed in between.
                remove_folder(path, descriptor)
            finally:
                os.close(descriptor)


def with_checksum(content: Mapping[str, Any]) -> str:
    """Returns JSON as a file's text, with a checksum of the content."""
    return _signed(json.dumps(content, indent=1))


def has_checksum(text: str) -> bool:
    """Returns whether a text is as :func:`with_checksum` gave it."""
    return _signed(text[: -len(_LAST_LINES.format("0" * 64))] + "\n}") == text


_LAST_LINES = ',\n "checksum": "{}"\n}}\n'


def _signed(plain: str) -> str:
    checksum = hashlib.sha256(f"{plain}\n".encode()).hexdigest()
    return plain.removesuffix("\n}") + _LAST_LINES.format(checksum)


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
