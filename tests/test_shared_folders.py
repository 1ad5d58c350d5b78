"""What is removed, followed and taken over in folders where others write too."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import ended
from small_graphs import small_graph

import pyg_sar
from pyg_sar.errors import CheckpointError, PartitionError
from pyg_sar.files import TemporaryFolder, remove_leftovers, replace_file
from pyg_sar.partition.storage import merge_partitions
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.script_files import PrivateFiles
from pyg_sar.train import report

FEW = {"method": "random", "memory": "64MiB"}


def partition(root: Path, said: list[str] | None = None, **options: Any) -> None:
    said = [] if said is None else said
    pyg_sar.write_partitions(small_graph(), 3, root, progress=said.append, **FEW, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Names that can be foretold ###################################################


def other_link(left: Path, data: Path) -> None:
    left.symlink_to(data, target_is_directory=True)


def other_file(left: Path, data: Path) -> None:
    left.write_text("mine")


def with_a_folder(left: Path, data: Path) -> None:
    data.rename(left)


def with_links(left: Path, data: Path) -> None:
    (left / "parts").mkdir(parents=True)
    (left / "request.json").symlink_to(data / "precious")


def with_a_linked_folder(left: Path, data: Path) -> None:
    left.mkdir()
    (left / "parts").symlink_to(data, target_is_directory=True)


@pytest.mark.parametrize(
    "make", [other_link, other_file, with_a_folder, with_links, with_a_linked_folder]
)
def test_what_has_the_name_of_an_unfinished_run_is_not_removed(
    make: Callable[[Path, Path], None], tmp_path: Path
):
    left, data = tmp_path / ".parts.unfinished", tmp_path / "data"
    data.mkdir()
    (data / "precious").write_text("years of work")
    make(left, data)
    place = data if data.exists() else left
    with pytest.raises(OSError, match="not that .*: move it elsewhere, or choose another folder"):
        partition(tmp_path / "parts")
    assert (place / "precious").read_text() == "years of work" and os.path.lexists(left)
    assert not (tmp_path / "parts").exists()


def test_another_users_folder_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor is it removed where it has the name of a temporary one."""
    (tmp_path / ".parts.unfinished").mkdir()
    (tmp_path / f".parts.tmp-{'0' * 16}").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="another user's folder"):
        partition(tmp_path / "parts")
    remove_leftovers(tmp_path)
    assert len(names(tmp_path)) == 2


def test_what_came_into_the_folder_meanwhile_stays(tmp_path: Path):
    """At the end ``DIR`` was replaced, whatever was in it by then."""
    root = tmp_path / "parts"
    for options in ({}, {"memory": "64MiB"}):

        def came(line: str) -> None:
            root.mkdir(exist_ok=True)
            (root / "notes.txt").write_text("mine")

        with pytest.raises(FileExistsError, match=r"'.*parts' exists"):
            pyg_sar.write_partitions(small_graph(), 2, root, "random", progress=came, **options)
        assert names(root) == ["notes.txt"]
        (root / "notes.txt").unlink()
    assert names(tmp_path) == [".parts.unfinished", "parts"]  # Hours of work, perhaps.
    said: list[str] = []
    pyg_sar.write_partitions(small_graph(), 2, root, "random", progress=said.append, memory="64MiB")
    assert "taking the assignment of a run that did not end" in said
    assert not [line for line in said if line.startswith("writing")]
    assert names(tmp_path) == ["parts"] and merge_partitions(root).num_nodes

    def came_too(line: str) -> None:
        (root / ".git").mkdir(exist_ok=True)

    with pytest.raises(FileExistsError, match="holds '.git' too"):
        pyg_sar.write_partitions(
            small_graph(), 2, root, "random", progress=came_too, overwrite=True
        )
    assert (root / ".git").is_dir() and merge_partitions(root).num_nodes


# What killed runs leave #######################################################


def killed(path: Path) -> None:
    def die(file: Path) -> None:
        file.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    folders = [TemporaryFolder(f"pyg_sar-{kind}-") for kind in ("run", "parts")]
    files = PrivateFiles()
    for folder in (*(one.path for one in folders), Path(files.folder)):
        (folder / "some").mkdir()
        (folder / "some" / "file").write_text("left")
    replace_file(path, die)


def test_the_next_run_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "t.ckpt"
    assert ended(killed, path) == -signal.SIGKILL
    assert len(names(tmp_path)) == 4
    precious = tmp_path / f"pyg_sar-parts-{'a' * 16}"  # Such a name, but no marker.
    precious.mkdir()
    (precious / "file").touch()
    (tmp_path / "pyg_sar-parts-of-mine").mkdir()
    link = tmp_path / f".x.tmp-{'b' * 16}"
    link.symlink_to(precious)
    with TemporaryFolder("pyg_sar-run-") as living:
        replace_file(path, lambda file: file.write_text("whole"))
        assert path.read_text() == "whole" and living.is_dir()
        assert names(tmp_path) == sorted(
            ["t.ckpt", "pyg_sar-parts-of-mine", precious.name, link.name, living.name]
        )
    assert not living.exists() and (precious / "file").exists()


def test_a_partition_that_was_being_replaced_comes_back(tmp_path: Path):
    """A run was killed between the two renames that put a folder in the place of another."""
    root = tmp_path / "parts"
    partition(root)
    folder = TemporaryFolder.beside(root)
    root.rename(folder.path / "replaced")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [folder.path.name]  # It is locked.
    detached = folder.close.detach()
    assert detached is not None
    os.close(detached[2][1])  # As if its process had been killed.
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["parts"] and merge_partitions(root).num_nodes


# Unfinished runs that were altered ############################################


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def other_count(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "num_nodes": 3}))


ALTERED: dict[str, list[tuple[str, Callable[[Path], object]]]] = {
    "request.json": [("", flip), ("", lambda path: path.write_text("[1]"))],
    "assignment.npy": [
        ("assignment.npy", flip),
        ("", lambda path: path.write_bytes(b"")),
    ],
    "assignment.json": [("", lambda path: path.write_text("{}")), ("", Path.unlink)],
    "part-00000-of-00003.safetensors.json": [
        ("", other_count),
        ("", lambda path: path.write_text("7")),
    ],
    "parts/part-00001-of-00003.safetensors": [
        ("part-00001-of-00003.safetensors", flip),
        ("", Path.unlink),
    ],
}


def test_an_altered_unfinished_run_gives_the_same_bytes(tmp_path: Path):
    root, whole = tmp_path / "parts", tmp_path / "whole"
    partition(whole)

    def came(line: str) -> None:
        root.mkdir(exist_ok=True)
        (root / "a").touch()

    for name, changes in ALTERED.items():
        for word, change in changes:
            with pytest.raises(FileExistsError, match="what is done is kept"):
                pyg_sar.write_partitions(small_graph(), 3, root, progress=came, **FEW)
            (root / "a").unlink()
            change(tmp_path / ".parts.unfinished" / name)
            said: list[str] = []
            partition(root, said)
            assert {p.name: p.read_bytes() for p in root.iterdir()} == {
                p.name: p.read_bytes() for p in whole.iterdir()
            }, (name, word)
            assert not word or any(f"'{word}' of a run" in line for line in said)
            for path in root.iterdir():
                path.unlink()


def test_only_regular_files_are_read(tmp_path: Path):
    """``metadata.json`` as a FIFO was waited for without end."""
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "edge_index.npy", np.array([[0, 1], [1, 0]]))
    for path in (tmp_path / "metadata.json", tmp_path / "g.npz", folder / "x.npy"):
        os.mkfifo(path)
    with pytest.raises(PartitionError, match="can't be read: .*no regular file"):
        pyg_sar.load_partition(tmp_path)
    for source in (tmp_path / "g.npz", folder):
        with pytest.raises(OSError, match="no regular file"):
            load_graph(str(source))
    os.mkfifo(tmp_path / "c")
    with pytest.raises(CheckpointError, match="there is no such file"):
        pyg_sar.tools.load_model(tmp_path / "c")


def test_a_report_follows_no_link(tmp_path: Path):
    """One that was put there in the middle of a run."""
    target, link = tmp_path / "target", tmp_path / "metrics.jsonl"
    target.write_text("mine\n")
    link.symlink_to(target)
    with pytest.raises(OSError, match="is a link, which this report did not make"):
        report._append(link, "{}\n")
    assert target.read_text() == "mine\n"
