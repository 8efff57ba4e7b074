"""What a machine is, by the kernel's files."""

from __future__ import annotations

from pathlib import Path

from conch.machine.facts import MachineFacts, processor
from conch.machine.memory import seconds_throttled


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_processor_is_named_by_the_kernel(tmp_path: Path) -> None:
    write(tmp_path, "cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Some CPU\n")

    assert processor(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    assert processor(tmp_path / "none")


def test_what_limits_the_speed_is_reported_where_the_system_shows_it(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "model name\t: Some CPU\nflags\t: fpu hypervisor\n")
    write(tmp_path, "proc/self/cgroup", "0::/group\n")
    write(tmp_path, "sys/fs/cgroup/group/cpu.max", "150000 100000\n")
    scaling = "sys/devices/system/cpu/cpu0/cpufreq"
    for name, text in (("governor", "powersave"), ("min_freq", "800000"), ("max_freq", "3600000")):
        write(tmp_path, f"{scaling}/scaling_{name}", f"{text}\n")
    write(tmp_path, "sys/class/dmi/id/sys_vendor", "Amazon EC2\n")

    facts = MachineFacts.read(tmp_path)

    assert (facts.governor, facts.frequencies, facts.quota) == ("powersave", (800_000_000, 3_600_000_000), 1.5)
    assert facts.cores == 1 and facts.all_cores >= 1
    assert str(facts).endswith(
        "a quota of 1.5 cores, governor powersave, 0.8 to 3.6 GHz, a virtual machine (Amazon EC2)"
    )


def test_what_the_system_does_not_show_is_left_out(tmp_path: Path) -> None:
    facts = MachineFacts.read(tmp_path)

    assert (facts.governor, facts.frequencies, facts.quota, facts.virtual) == ("", (), None, "")
    assert "governor" not in str(facts)


def test_throttling_is_timed_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/job\n0::/unified\n")
    write(tmp_path, "proc/7/cgroup", "0::/other\n")
    write(tmp_path, "sys/fs/cgroup/cpu/job/cpu.stat", "nr_periods 9\nnr_throttled 4\nthrottled_time 1500000000\n")
    write(tmp_path, "sys/fs/cgroup/unified/cpu.stat", "usage_usec 1\nnr_throttled 2\nthrottled_usec 250000\n")

    assert seconds_throttled(root=tmp_path) == 1.75
    assert seconds_throttled(7, tmp_path) == 0
