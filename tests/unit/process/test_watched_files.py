"""Which changes of files are noticed, and when."""

from __future__ import annotations

import os
from pathlib import Path

from cellgate.proxy.process.signals import WatchedFiles


def test_a_rewritten_file_is_noticed_once_it_rests(tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text("one")
    watched = WatchedFiles([str(file)])
    assert not watched.changed()
    file.write_text("three")
    assert [watched.changed() for _ in range(4)] == [False, True, False, False]


def test_files_that_are_still_written_are_not_taken(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("cert", "key")]
    for file in files:
        file.write_text("old")
    watched = WatchedFiles(map(str, files))
    files[0].write_text("new certificate")
    assert not watched.changed()
    files[1].write_text("new key")
    assert [watched.changed() for _ in range(3)] == [False, True, False]


def test_a_swapped_link_to_a_folder_is_noticed(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_text("same")
    link = tmp_path / "..data"
    link.symlink_to("first")
    (tmp_path / "tls.crt").symlink_to("..data/tls.crt")
    watched = WatchedFiles([str(tmp_path / "tls.crt")])
    (tmp_path / "next").symlink_to("second")
    os.replace(tmp_path / "next", link)
    assert [watched.changed() for _ in range(3)] == [False, True, False]


def test_a_file_that_goes_and_comes_back_is_noticed(tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text("one")
    watched = WatchedFiles([str(file)])
    file.unlink()
    assert [watched.changed() for _ in range(3)] == [False, True, False]
    file.write_text("two")
    assert [watched.changed() for _ in range(3)] == [False, True, False]
