"""`python -m funcamp doctor`: check this machine; `report`: name the mistakes of a training loop."""

from __future__ import annotations

import argparse
import sys

import torch

from funcamp._doctor import examine, report
from funcamp.report import command


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status: 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser("python -m funcamp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check this machine: compiler, parity with torch's loop, time")
    doctor.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    audit = commands.add_parser("report", help="run a script, and name the mistakes of its training loop")
    command.add_arguments(audit)
    args = parser.parse_args(argv)
    if args.command == "report":
        return command.run(audit, args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        doctor.error("--device cuda needs a GPU that this torch can use; got none")
    findings = examine(device)
    sys.stdout.write(report(findings) + "\n")
    return int(not all(finding.ok for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
