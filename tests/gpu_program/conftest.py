"""Each file of tests here runs in one process of `fake_cuda`; its tests report what they came to there."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support import fake_cuda
from tests.support.launch import ENVIRONMENT, ROOT

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # Triton is made for Linux

#: Triton decides when it is imported whether to interpret functions or to compile them.
COMPILED = ("test_counted",)
_errors: dict[Path, dict[str, str]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if fake_cuda.loaded():
        return None
    path = pyfuncitem.path
    if path not in _errors:
        _errors[path] = _run(path, [item.nodeid for item in pyfuncitem.session.items if item.path == path])
    if error := _errors[path].get(pyfuncitem.name, "did not run"):
        pytest.fail(error, pytrace=False)
    return True


def _run(path: Path, chosen: list[str]) -> dict[str, str]:
    """Run tests in a process with the device; return for each its error, "" if there is none."""
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": str(int(path.stem not in COMPILED))}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            fake_cuda.__name__,
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        ended = subprocess.run([*command, *chosen], cwd=ROOT, env=environment, capture_output=True, text=True)
        if not report.exists():
            return {node.split("::")[-1]: ended.stdout[-4000:] + ended.stderr[-4000:] for node in chosen}
        cases = ElementTree.parse(report).iter("testcase")
        return {
            case.attrib["name"]: "\n".join(fault.text or "" for fault in case if fault.tag in _FAULTS) for case in cases
        }


_FAULTS = ("failure", "error")
