"""The memory that control groups leave to the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellgate.proxy.config.checks import cgroup_limits


@pytest.mark.parametrize(
    ("group", "files", "limits"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "400"}, [400]),
        ("0::/", {"memory.max": "300"}, [300]),
        ("1:cpu:/\n4:memory:/a", {"memory/memory.limit_in_bytes": "200"}, [200]),
        ("1:cpu:/", {}, []),
    ],
)
def test_the_limits_of_control_groups_count(
    tmp_path: Path, group: str, files: dict[str, str], limits: list[int]
) -> None:
    for name, text in {
        "proc/self/cgroup": group,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert list(cgroup_limits(tmp_path)) == limits
