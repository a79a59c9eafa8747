"""The native kernels are built where a compiler is, say why not elsewhere, and run only what the processor has."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from clearhead.backends import native_library
from clearhead.backends.native_library import NAME, library, why_missing
from clearhead.cli import app
from compiler import COMPILER, NAMES

ROOT = Path(__file__).parents[1]
# What /proc/cpuinfo must list for each instruction set, by Linux's names.
CPUINFO = {
    "baseline": set(),
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"},
    "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "avx512bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}


@pytest.fixture
def native():
    """The kernels, as they are at import: a test that needs them is skipped only where nothing could build them."""
    module = library()
    if module is None:
        pytest.skip(why_missing())
    before = module.isa()
    yield module
    module.set_isa(before)


@pytest.fixture
def isa(monkeypatch):
    """Sets CLEARHEAD_ISA, as before the import."""

    def set_isa(name):
        monkeypatch.setenv("CLEARHEAD_ISA", name)
        library.cache_clear()

    yield set_isa
    library.cache_clear()


def test_kernels_are_built_where_a_compiler_is():
    if COMPILER is None:
        pytest.skip(f"no C++ compiler: none of {', '.join(NAMES)} is in PATH")
    if library() is None:
        pytest.fail(
            f"{COMPILER} is here, but the kernels it should have built are not ({NAME}): run make test, "
            "then read in build/install.log what stopped them",
            pytrace=False,
        )
    assert library() is sys.modules[NAME]
    assert why_missing() is None


def test_all_instruction_sets_of_the_processor_are_there(native):
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or native.isas()[-1] != "baseline":
        pytest.skip("needs Linux's list of the features of an x86-64 processor")
    flags = set(next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split())
    expected = []
    for name, needed in CPUINFO.items():  # each includes the ones before it
        if not needed <= flags:
            break
        expected.insert(0, name)
    assert native.isas() == expected


def test_the_best_is_the_default(native):
    code = "from clearhead.backends.native_library import library; print(library().isa())"
    env = {name: value for name, value in os.environ.items() if name != "CLEARHEAD_ISA"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == native.isas()[0]


def test_the_environment_chooses_another(native, isa):
    for name in native.isas():
        isa(name)
        assert library().isa() == name


@pytest.mark.parametrize("name", ["sse9", "AVX2", "rvv", "avx2 "])
def test_an_instruction_set_that_is_not_here_is_one_error(native, isa, name):
    isa(name)
    expected = f"CLEARHEAD_ISA must be one of {', '.join(native.isas())}, .* got {name!r}"
    with pytest.raises(ValueError, match=expected):
        library()


def test_set_isa_chooses_and_refuses(native):
    for name in native.isas():
        native.set_isa(name)
        assert native.isa() == name
    with pytest.raises(ValueError, match=f"choose from {', '.join(native.isas())}"):
        native.set_isa("sse9")
    assert native.isa() == native.isas()[-1]


def test_one_openmp_in_the_process(native):
    """Two copies would mean two teams of threads; torch's is found by its name."""
    maps = Path("/proc/self/maps")
    if not maps.exists() or not native.openmp():
        pytest.skip("needs Linux's list of loaded libraries, and kernels with threads")
    torch.ones(3).exp()
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line}
    assert len(loaded) == 1, loaded


def test_no_kernel_defines_what_another_could_use():
    """Code for AVX-512 in a weak symbol (an inline function, a template) may be linked into what runs anywhere."""
    objects = list(ROOT.glob("build/cp*/CMakeFiles/kernels_*/native/*.o"))
    if shutil.which("nm") is None or not objects:
        pytest.skip("needs nm and a build in place: make test")
    for path in objects:
        symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout.splitlines()
        assert any("kernels_" in symbol for symbol in symbols), path
        assert not [symbol for symbol in symbols if {" W ", " V ", " u "} & {symbol[16:19]}], path


# -- without kernels: as on a machine that could not build them ----------------------------------------------------


@pytest.fixture
def reimport(monkeypatch):
    """The next call of library() imports again, and so does the first after the test."""

    def forget():
        library.cache_clear()
        native_library._load.cache_clear()

    monkeypatch.delenv("CLEARHEAD_ISA", raising=False)
    forget()
    yield monkeypatch
    forget()


@pytest.fixture
def not_built(reimport):
    reimport.setitem(sys.modules, NAME, None)  # an import of it says that there is no such module


class Refuses:
    """A finder as a loader that can't open what the kernels need."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == NAME:
            raise ImportError("libgomp.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("platform", "way_out"),
    [
        ("linux", "apt install g++ python3-dev"),
        ("darwin", "xcode-select --install"),
        ("win32", "for Linux and macOS"),
    ],
)
def test_not_built_says_how_to_get_them(not_built, monkeypatch, platform, way_out):
    monkeypatch.setattr(sys, "platform", platform)
    assert library() is None
    assert why_missing().startswith("the native kernels were not built: ")
    assert way_out in why_missing()


def test_another_error_of_the_import_is_kept(reimport):
    reimport.delitem(sys.modules, NAME, raising=False)
    reimport.setattr(sys, "meta_path", [Refuses, *sys.meta_path])
    assert library() is None
    assert why_missing() == (
        "the native kernels are there but do not load: libgomp.so.1: cannot open shared object file"
    )


def test_choosing_an_instruction_set_without_kernels_is_an_error(not_built, isa):
    isa("avx2")
    with pytest.raises(ValueError, match=r"CLEARHEAD_ISA='avx2' chooses among native kernels: .* were not built"):
        library()


def test_a_compiler_that_comes_later_gets_all_its_flags(tmp_path):
    """What a search without a compiler left in the cache of a kept build was there for good: no -O3, no format."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the environment's own tools first
    cmake, ninja, nanobind = shutil.which("cmake", path=path), shutil.which("ninja", path=path), find_spec("nanobind")
    if COMPILER is None or cmake is None or ninja is None or nanobind is None:
        pytest.skip("needs a C++ compiler, cmake, ninja and nanobind")
    options = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": Path(nanobind.origin).parent / "cmake",
    }
    command = [cmake, "-G", "Ninja", "-S", ROOT, "-B", tmp_path, *(f"-D{name}={at}" for name, at in options.items())]

    def configure(compiler):
        environment = os.environ | {"CXX": compiler}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    failed = configure(shutil.which("false"))
    assert failed.returncode != 0
    assert "No C++ compiler was found that works." in failed.stderr
    done = configure(COMPILER)
    assert done.returncode == 0, done.stderr
    cache = (tmp_path / "CMakeCache.txt").read_text()
    assert "CMAKE_CXX_FLAGS_RELEASE:STRING=-O3" in cache
    assert "CMAKE_EXECUTABLE_FORMAT:INTERNAL=Unknown" not in cache


# -- clearhead info ------------------------------------------------------------------------------------------------


def info():
    return CliRunner().invoke(app, ["info"], env={"COLUMNS": "100"})


def test_info_names_what_runs(native):
    line = next(line for line in info().stdout.splitlines() if line.startswith("  kernels"))
    assert line.split()[1] == f"{native.isa()},"
    assert (f"{torch.get_num_threads()} thread" if native.openmp() else "built without OpenMP") in line


def test_info_says_once_what_is_missing(not_built, monkeypatch):
    monkeypatch.setattr("clearhead.backends.native._MISSING", why_missing())  # asked at import
    output = " ".join(info().stdout.split())
    assert f"kernels torch's alone: {why_missing()}" in output
    assert output.count("were not built") == 1
    assert "native: there are no kernels, see above" in output


def test_info_with_an_unknown_instruction_set_is_one_line(native, isa):
    isa("sse9")
    done = info()
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: CLEARHEAD_ISA must be one of ")
    assert done.stderr.count("\n") == 1
