"""What is shipped: one version, the extension's files in the wheel, types, exports."""

from __future__ import annotations

import email
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pg_queen
import pytest
from pg_queen.errors import InstallError
from pg_queen.install import extension_files, extension_version

from tools.cluster import ROOT


def _control_version() -> str:
    control = (ROOT / "extension" / "pg_queen.control").read_text(encoding="utf-8")
    found = re.search(r"default_version = '(.*)'", control)
    assert found is not None
    return found.group(1)


def _build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)]
    return subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)


def test_the_installed_version_is_that_of_the_control_file() -> None:
    assert pg_queen.__version__ == extension_version() == _control_version(), "run pip install -e python again"


def test_the_wheel_holds_the_extension(extension: None, tmp_path: Path) -> None:
    done = _build(ROOT / "python", tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
        metadata = email.message_from_string(archive.read(f"pg_queen-{_control_version()}.dist-info/METADATA").decode())
    assert metadata["Version"] == _control_version()
    assert "pg_queen/py.typed" in names
    for file in extension_files():
        assert (tmp_path / "site" / "pg_queen" / "extension" / file.name).read_bytes() == file.read_bytes()
    # And the package finds them there.
    program = "from pg_queen.install import extension_files; print(*extension_files(), sep='\\n')"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "site", capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[0] == str(tmp_path / "site" / "pg_queen" / "extension" / "pg_queen.control")


def test_no_wheel_and_no_install_without_the_built_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "python", tmp_path / "python")
    (tmp_path / "extension").mkdir()
    shutil.copy(ROOT / "extension" / "pg_queen.control", tmp_path / "extension")
    done = _build(tmp_path / "python", tmp_path / "wheels")
    assert done.returncode != 0
    assert "make build" in done.stdout + done.stderr
    monkeypatch.setattr(sys.modules["pg_queen.install"], "_directory", lambda: tmp_path / "extension")
    with pytest.raises(InstallError, match="not built") as error:
        extension_files()
    assert error.value.hint == f"Run: make -C {tmp_path} build"


def test_every_module_declares_what_it_exports() -> None:
    for module in pkgutil.walk_packages(pg_queen.__path__, "pg_queen."):
        if module.name == "pg_queen.__main__":
            continue
        loaded = importlib.import_module(module.name)
        assert loaded.__doc__, module.name
        assert sorted(loaded.__all__) == sorted(set(loaded.__all__)), module.name
        for name in loaded.__all__:
            assert hasattr(loaded, name), f"{module.name}.{name}"


def test_the_client_needs_neither_typer_nor_rich() -> None:
    program = "import sys, pg_queen; sys.exit(any(m.split('.')[0] in ('typer', 'rich', 'click') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
