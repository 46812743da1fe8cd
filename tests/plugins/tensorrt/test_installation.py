"""Where TensorRT is looked for, and what is said of what is not here: with folders that are laid
out like pip's and NVIDIA's."""

from __future__ import annotations

import sys

import pytest

from pensieve.plugins.tensorrt import installation
from pensieve.plugins.tensorrt.installation import find_tensorrt, fits, headers_version, text
from pensieve.scheduler.types import SettingError
from pensieve.scripts import doctor

OLD_MACROS = "#define NV_TENSORRT_MAJOR {} //!< major\n#define NV_TENSORRT_MINOR {}\n"
NEW_MACROS = (
    "#define TRT_MAJOR_ENTERPRISE {}\n#define TRT_MINOR_ENTERPRISE {}\n"
    "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE //!< major\n"
    "#define NV_TENSORRT_MINOR TRT_MINOR_ENTERPRISE //!< minor\n"
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages, without any; neither the loader nor a variable knows TensorRT."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(installation, "SYSTEM_HEADERS", ())
    monkeypatch.setattr(installation, "_loader_cache", lambda: "")
    for name in ("TENSORRT_HOME", "TENSORRT_INCLUDE", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


def file(path, content=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def package(site, name, version):
    """Writes the metadata that pip writes for each package."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    file(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def headers(folder, major=8, minor=5, macros=OLD_MACROS):
    file(folder / "NvInfer.h")
    file(folder / "NvInferVersion.h", macros.format(major, minor))
    return folder


@pytest.mark.parametrize(
    ("name", "version", "place"),
    [
        ("tensorrt-cu13-libs", "11.4.0.106", "tensorrt_cu13_libs/libnvinfer.so.11"),
        ("tensorrt-cu12-libs", "10.13.0.35", "tensorrt_libs/libnvinfer.so.10"),
        ("tensorrt", "8.5.3.1", "tensorrt/libnvinfer.so.8"),
        ("tensorrt", "8.5.3.1", "libnvinfer.so.8"),
    ],
)
def test_the_library_is_where_pip_puts_it(site, monkeypatch, name, version, place):
    package(site, name, version)
    library = file(site / place)
    file(library.with_name("libnvinfer_builder_resource.so.8"))
    monkeypatch.setenv("TENSORRT_INCLUDE", str(headers(site / "named")))
    tensorrt = find_tensorrt()
    assert (tensorrt.library, text(tensorrt.version)) == (library, version)
    assert tensorrt.headers == site / "named"


def test_packages_come_first_then_the_variable_then_the_loader(site, monkeypatch):
    system = file(site.parent / "usr" / "libnvinfer.so.10.3.0")
    monkeypatch.setattr(
        installation, "_loader_cache", lambda: f"\tlibnvinfer.so.10 (libc6) => {system}\n"
    )
    monkeypatch.setattr(installation, "SYSTEM_HEADERS", (headers(site.parent / "usr-include"),))
    assert (find_tensorrt().library, find_tensorrt().version) == (system, (10, 3, 0))
    named = file(site.parent / "named" / "libnvinfer.so.10")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{named.parent}")
    assert find_tensorrt().library == named
    home = site.parent / "home"
    linked = file(home / "lib" / "libnvinfer.so.8.6.1")
    (home / "lib" / "libnvinfer.so").symlink_to(linked)
    headers(home / "include")
    monkeypatch.setenv("TENSORRT_HOME", str(home))
    tensorrt = find_tensorrt()
    assert (tensorrt.library, tensorrt.version) == (linked, (8, 6, 1))
    assert tensorrt.headers == home / "include"
    packaged = file(site / "tensorrt_libs" / "libnvinfer.so.10")
    assert find_tensorrt().library == packaged


def test_headers_are_beside_the_library(site):
    file(site / "tensorrt_libs" / "libnvinfer.so.10")
    beside = headers(site / "tensorrt_libs" / "include")
    assert find_tensorrt().headers == beside


@pytest.mark.parametrize("macros", [OLD_MACROS, NEW_MACROS])
def test_headers_tell_their_version(tmp_path, macros):
    assert headers_version(headers(tmp_path, 10, 16, macros)) == (10, 16)
    assert headers_version(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    ("headers", "library", "fit"),
    [
        ((8, 5, 3), (8, 5, 3), True),
        ((8, 5, 3), (8, 6, 1), True),
        ((8, 6, 1), (8, 5, 3), False),
        ((10, 0, 1), (8, 6, 1), False),
        ((10, 3), (10,), True),
        ((10, 3), (11,), False),
        ((8, 5), (), True),
    ],
)
def test_headers_fit_a_library_of_the_same_major_version(headers, library, fit):
    assert fits(headers, library) is fit


def examine():
    return doctor._tensorrt()


def test_the_doctor_says_that_nothing_is_here(site):
    finding = examine()
    assert finding.state == "not usable"
    assert "TensorRT is not here: pip install 'pensieve[tensorrt]'" in finding.advice


def test_the_doctor_names_a_placeholder(site):
    package(site, "tensorrt-cu13", "11.4.0.106")
    assert "tensorrt-cu13 11.4.0.106 is a placeholder" in examine().advice
    assert "https://pypi.nvidia.com" in examine().advice


def test_the_doctor_names_bindings_alone(site):
    package(site, "tensorrt-cu13-bindings", "11.4.0.106")
    file(site / "tensorrt_bindings" / "__init__.py")
    assert "Python bindings are here alone" in examine().advice


def test_the_doctor_names_the_lean_runtime_alone(site):
    package(site, "tensorrt-lean-cu13-libs", "11.4.0.106")
    file(site / "tensorrt_lean_libs" / "libnvinfer_lean.so.11")
    assert "lean runtime is here alone" in examine().advice


def test_the_doctor_says_where_headers_come_from(site):
    package(site, "tensorrt", "8.5.3.1")
    file(site / "tensorrt" / "libnvinfer.so.8")
    advice = examine().advice
    assert "TensorRT 8.5.3.1 is here" in advice and "TENSORRT_INCLUDE" in advice


def test_the_doctor_names_headers_of_another_version(site):
    package(site, "tensorrt", "8.5.3.1")
    file(site / "tensorrt" / "libnvinfer.so.8")
    headers(site / "tensorrt" / "include", 10, 0)
    assert "are of TensorRT 10.0, and" in examine().advice


def test_a_variable_that_names_nothing_is_not_passed_over(site, monkeypatch):
    monkeypatch.setenv("TENSORRT_HOME", "/nowhere")
    with pytest.raises(SettingError, match="TENSORRT_HOME has no /nowhere/lib"):
        find_tensorrt()


def test_the_doctor_says_what_fits(site, monkeypatch):
    from pensieve.builder.tensorrt import installed

    package(site, "tensorrt", "8.5.3.1")
    file(site / "tensorrt" / "libnvinfer.so.8")
    folder = headers(site / "tensorrt" / "include")
    loaded = type("Loaded", (), {"version": (8, 5, 3)})
    monkeypatch.setattr(installed, "load_library", lambda: loaded)
    state = f"8.5.3 from the package in {folder.parent}, headers of 8.5 in {folder}"
    assert examine().state == f"{state}; the plugins fit"
