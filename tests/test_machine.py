"""What is left of the machine: quotas and memory limits of cgroups, of version 1 and 2, at every level."""

from pathlib import Path

from tp_residual.machine import available_memory, cpu_quota


def test_the_quota_is_the_least_of_this_group_and_those_above(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    inner = tmp_path / "root" / "a" / "b"
    inner.mkdir(parents=True)
    assert cpu_quota(tmp_path / "root", own) is None
    (inner / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path / "root", own) is None
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path / "root", own) == 1.5
    (inner / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path / "root", own) == 0.5


def test_version_1_of_cgroups_is_read_too(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:cpu,cpuacct:/box\n3:memory:/other\n")
    group = tmp_path / "root" / "cpu" / "box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path / "root", own) is None
    (group / "cpu.cfs_quota_us").write_text("300000\n")
    assert cpu_quota(tmp_path / "root", own) == 3.0


def available(root: Path, own: str, kib: int = 1000) -> int:
    root.mkdir(exist_ok=True)
    (root / "own").write_text(own)
    (root / "meminfo").write_text(f"MemTotal: 5000 kB\nMemAvailable:  {kib} kB\n")
    return available_memory(root, root / "own", root / "meminfo")


def limit_group(folder: Path, limit: str, usage: int, statistics: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(statistics)


def test_memory_is_the_least_of_the_machine_and_every_group(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert available(root, "0::/a/b\n") == 1_024_000
    limit_group(root / "a/b", "max", 700, "anon 500\n")
    assert available(root, "0::/a/b\n") == 1_024_000
    limit_group(root / "a", "500000", 490_000, "anon 100000\nactive_file 90000\ninactive_file 300000\nslab 7\n")
    assert available(root, "0::/a/b\n") == 400_000, "files give way"
    limit_group(root, "450000", 460_000, "anon 460000\n")
    assert available(root, "0::/a/b\n") == 0
    assert available(root, "0::/\n") == 0
    limit_group(root, "max", 460_000, "")
    assert available(root, "0::/a/b\n", kib=3) == 3072


def test_memory_limits_of_version_1_are_read_too(tmp_path: Path) -> None:
    root = tmp_path / "root"
    box = root / "memory/box"
    box.mkdir(parents=True)
    (box / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # what no limit looks like
    (box / "memory.usage_in_bytes").write_text("5000\n")
    (box / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 3000\ntotal_active_file 500\n")
    assert available(root, "7:memory:/box\n4:cpu:/other\n") == 1_024_000
    (box / "memory.limit_in_bytes").write_text("10000\n")
    assert available(root, "7:memory:/box\n4:cpu:/other\n") == 8500
