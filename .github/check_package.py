"""Check dist/: what the files contain, and that the wheel runs the README's loop. `make package` runs this."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracked(*folders: str) -> set[str]:
    """Return the files that git has in these folders."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def check_contents(wheel: Path, sdist: Path) -> None:
    """Compare the contents of both files with the files that git has."""
    name = wheel.name.split("-py3")[0]
    info = {f"{name}.dist-info/{file}" for file in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel) as zipped:
        inside = set(zipped.namelist())
    assert inside == tracked("funcamp") | info, sorted(inside ^ (tracked("funcamp") | info))
    with tarfile.open(sdist) as tarred:
        inside = {file.name.removeprefix(f"{name}/") for file in tarred if file.isfile()}
    expected = {file for file in tracked() if not file.startswith(".ci/")} | {"PKG-INFO"}
    assert inside == expected, sorted(inside ^ expected)


def run_readme(wheel: Path) -> None:
    """Install the wheel into an empty environment and run the first code block of the README there."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        python = Path(folder, "venv", "bin", "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel.resolve()], check=True)
        code = block[1] + "\nprint(funcamp.__file__, metrics.loss)\n"
        subprocess.run([python, "-c", code], cwd=folder, check=True)


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_contents(wheel, sdist)
    run_readme(wheel)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
