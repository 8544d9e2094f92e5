"""The compiled kernels' cache: built once, never from a place that others can write, rebuilt when damaged, and done without in words."""

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tp_residual.kernels import build

ANSWER = 'extern "C" int answer() { return %d; }\n'
PROGRAM = """
import sys
from pathlib import Path
from tp_residual.kernels import build
build.SOURCES = Path(sys.argv[1])
print(build.unavailable() or build.library().answer())
"""

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


class Place:
    """Small sources, an empty cache and a compiler that counts its runs, in the environment that the tests' processes get."""

    def __init__(self, folder: Path) -> None:
        self.sources, self.cache, self.temporary, self.runs = (
            folder / name for name in ("csrc", "cache", "temporary", "runs")
        )
        self.sources.mkdir()
        self.temporary.mkdir()
        self.folder = folder
        self.write_sources(42)
        self.environment = os.environ | {"XDG_CACHE_HOME": str(self.cache), "TMPDIR": str(self.temporary)}
        self.set_compiler('exec c++ "$@"')

    def write_sources(self, answer: int) -> None:
        (self.sources / "answer.cpp").write_text(ANSWER % answer)

    def set_compiler(self, script: str) -> None:
        """`script` runs after the run was counted; asking for the version does not count."""
        compiler = self.folder / "compiler"
        count = f'case "$*" in *--version*) ;; *) echo run >> "{self.runs}" ;; esac'
        compiler.write_text(f"#!/bin/sh\n{count}\n{script}\n")
        compiler.chmod(0o700)
        self.environment["CXX"] = str(compiler)

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, str(self.sources)]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)

    def output(self) -> str:
        process = self.start()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return output.strip()

    def compiled(self) -> int:
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0

    def libraries(self, where: Path | None = None) -> list[Path]:
        return sorted((where or self.cache).rglob("*.so"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The same place for builds in this process."""
    for name in ("XDG_CACHE_HOME", "CXX"):
        monkeypatch.setenv(name, place.environment[name])
    monkeypatch.setattr("tempfile.tempdir", str(place.temporary))
    monkeypatch.setattr(build, "SOURCES", place.sources)
    build._result.cache_clear()
    yield place
    build._result.cache_clear()


def test_eight_simultaneous_starts_build_once(place: Place) -> None:
    place.set_compiler('sleep 1; exec c++ "$@"')  # so that all eight come while it is being built
    processes = [place.start() for _ in range(8)]
    assert [process.communicate(timeout=100)[0].strip() for process in processes] == ["42"] * 8
    assert place.compiled() == 1 and len(place.libraries()) == 1
    assert place.output() == "42" and place.compiled() == 1


DAMAGES = {
    "half written": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "first byte": lambda data: b"\0" + data[1:],
    "last byte gone": lambda data: data[:-1],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_built_again(place: Place, damage) -> None:
    assert place.output() == "42"
    (library,) = place.libraries()
    library.write_bytes(damage(library.read_bytes()))
    assert place.output() == "42" and place.compiled() == 2
    assert place.output() == "42" and place.compiled() == 2


def test_what_an_ended_builder_left_is_in_nobodys_way(place: Place) -> None:
    place.set_compiler('case "$*" in *--version*) exit 0 ;; esac; kill -9 $PPID')
    with place.start() as process:
        assert process.wait(timeout=60) == -9
    (left,) = place.cache.rglob("build-*")
    place.set_compiler('exec c++ "$@"')
    assert place.output() == "42"
    assert not left.exists()


def test_a_library_is_for_its_sources_compiler_and_cpu(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> set[str]:
        build._result.cache_clear()
        build.library()
        return {path.name for path in here.libraries()}

    known = names()
    assert names() == known  # nothing changed

    here.write_sources(43)
    assert len(names()) == 2 and build.library().answer() == 43
    (here.sources / "more.h").write_text("// a header counts\n")
    assert len(names()) == 3
    (here.sources / "more.cpp").write_text('extern "C" int more() { return 7; }\n')
    assert len(names()) == 4 and build.library().more() == 7 and build.library().answer() == 43
    monkeypatch.setattr(build, "_cpu_features", lambda: "flags: another machine's")
    assert len(names()) == 5
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANOTHER"))
    assert len(names()) == 6
    here.set_compiler('case "$*" in *--version*) echo another compiler; exit 0 ;; esac; exec c++ "$@"')
    assert len(names()) == 7


def test_a_process_keeps_its_library(here: Place) -> None:
    library = build.library()
    shutil.rmtree(here.cache)
    assert build.library() is library and here.compiled() == 1
    assert build.holding_lock(library).answer() == 42


def test_an_unusable_home_means_the_temporary_folder(place: Place) -> None:
    file = place.folder / "file"
    file.write_text("")
    for home in (file, place.folder / "file" / "below"):  # neither can hold a folder, not even for root
        del place.environment["XDG_CACHE_HOME"]
        place.environment |= {"HOME": str(home)}
        assert place.output() == "42"
        (library,) = place.libraries(place.temporary)
        assert library.is_relative_to(place.temporary / f"tp_residual-{os.geteuid()}")
        assert (library.parent.stat().st_mode & 0o777) == 0o700
        place.environment["XDG_CACHE_HOME"] = ""
    assert place.compiled() == 1


def test_nothing_is_loaded_from_where_others_can_write(place: Place) -> None:
    assert place.output() == "42"
    (library,) = place.libraries()
    library.parent.chmod(0o777)
    assert place.output() == "42" and place.compiled() == 2  # built in the temporary folder instead
    (elsewhere,) = place.libraries(place.temporary)
    elsewhere.parent.chmod(0o770)
    assert "can be written by other users" in place.output()
    elsewhere.parent.chmod(0o700)
    place.temporary.chmod(0o777)
    assert (
        "can be written by other users (mode 777)" in place.output()
    )  # whoever may rename the folder may put another there
    place.temporary.chmod(0o1777)
    assert place.output() == "42" and place.compiled() == 2


def test_a_folder_of_another_user_is_refused(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    build.library()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    build._result.cache_clear()
    reason = build.unavailable()
    assert (
        reason is not None
        and f"belongs to user {me}, not to user {me + 1}" in reason
        and "set XDG_CACHE_HOME" in reason
    )


def test_a_link_is_judged_by_where_it_leads(place: Place) -> None:
    open_to_all = place.folder / "open"
    (open_to_all / "mine").mkdir(parents=True, mode=0o700)
    open_to_all.chmod(0o777)
    (place.folder / "link").symlink_to(open_to_all / "mine")
    place.environment["XDG_CACHE_HOME"] = str(place.folder / "link")
    assert place.output() == "42"
    assert not place.libraries(open_to_all) and place.libraries(place.temporary)


def test_without_a_working_compiler_the_reason_is_given_and_said_once(
    here: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reason() -> str:
        build._result.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=build.__name__):
            first = build.unavailable()
            assert build.unavailable() == first
            with pytest.raises(build.BuildError, match=re.escape(str(first))):
                build.library()
        said = [record.message for record in caplog.records if not record.message.startswith("compiling")]
        assert first is not None and len(said) == 1
        assert first in caplog.text and "plain torch is used" in caplog.text
        return first

    here.set_compiler('case "$*" in *--version*) exit 0 ;; esac; echo "all.cpp:1: error: out of order" >&2; exit 3')
    assert "failed with code 3: all.cpp:1: error: out of order" in reason()
    assert not list(here.cache.rglob("build-*")) and not here.libraries()
    here.set_compiler('case "$*" in *--version*) exit 0 ;; esac; sleep 60')
    monkeypatch.setattr(build, "LIMIT_S", 0.2)
    assert "timed out after 0.2 seconds" in reason()
    monkeypatch.setenv("CXX", "/nowhere/c++ -O1")
    assert reason() == "CXX=/nowhere/c++ -O1 names no program; unset it or name a C++17 compiler"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(here.folder / "nothing"))
    assert "no C++ compiler: none of c++, g++, clang++ is in PATH" in reason()


def test_of_a_launchers_ranks_one_says_it(
    here: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "nonsense")
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        build._result.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=build.__name__):
            assert build.unavailable() == "CXX=nonsense names no program; unset it or name a C++17 compiler"
        assert len(caplog.records) == lines


def test_a_session_compiles_before_it_has_a_clock_and_says_so(
    here: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tp_residual.cli.launch import TimeLimits, open_group

    monkeypatch.delenv("RANK", raising=False)
    with caplog.at_level(logging.INFO, logger=build.__name__):
        open_group("cpu", TimeLimits()).close()
    assert here.compiled() == 1 and len(here.libraries()) == 1
    assert [record.message for record in caplog.records] == [
        "compiling the CPU kernels: some seconds, once on this machine"
    ]


def test_a_command_that_is_none_and_a_program_that_compiles_nothing_are_named(place: Place) -> None:
    place.environment["CXX"] = 'g++ "x'
    assert place.output() == 'CXX=g++ "x is no command (No closing quotation); unset it or name a C++17 compiler'
    place.environment["CXX"] = "true"
    assert "true ended without an error and wrote no library; set CXX to a C++17 compiler" in place.output()
    assert not place.libraries()


def test_a_full_folder_is_passed_over(place: Place) -> None:
    """As gcc's linker says it, and once: the folder is the fault, and not the flags."""
    full = f'case "$*" in *--version*|*{place.temporary}*) ;; *) echo "ld: error: No space left on device" >&2; exit 1 ;; esac'
    place.set_compiler(f'{full}; exec c++ "$@"')
    assert place.output() == "42"
    assert not place.libraries() and len(place.libraries(place.temporary)) == 1
    assert place.compiled() == 2


@pytest.mark.parametrize("complaint", ["error: out of order", "ld: No space left on device"])
def test_processes_that_wait_do_not_repeat_a_failure(place: Place, complaint: str) -> None:
    place.set_compiler(f'case "$*" in *--version*) exit 0 ;; esac; sleep 1; echo "{complaint}" >&2; exit 1')
    processes = [place.start() for _ in range(5)]
    answers = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert len(answers) == 1 and complaint in answers.pop()
    assert place.compiled() == 2  # with and without this CPU's flags; or one in each folder
    place.set_compiler('case "$*" in *--version*) exit 0 ;; esac; exec c++ "$@"')
    assert place.output() == "42"  # a later start tries again


def test_a_compiler_that_does_not_know_this_cpu_builds_without(place: Place) -> None:
    place.set_compiler('case "$*" in *=native*) echo "error: bad value native" >&2; exit 1 ;; esac; exec c++ "$@"')
    assert place.output() == "42" and place.compiled() == 2
