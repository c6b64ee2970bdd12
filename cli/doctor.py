"""`omlxctl doctor`: looks at everything the daemon needs and says what to do about what is wrong.

Only reads; starts no daemon and repairs nothing. Main thread only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from omlxd.cli.context import Context
from omlxd.cli.doctor_daemon import check_daemon, check_service, service_health
from omlxd.cli.doctor_files import check_home, check_lock, check_settings_and_disk, check_socket
from omlxd.cli.doctor_system import check_packages, check_wired_limit
from omlxd.cli.errors import DONE, REFUSED
from omlxd.cli.finding import Finding
from omlxd.cli.parser import Parser
from omlxd.cli.service_status import Health

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Doctor:
    """Exit code 1 when a check failed; warnings alone leave it 0."""

    def arguments(self, parser: Parser) -> None:
        pass

    def run(self, context: Context, given: argparse.Namespace) -> int:
        findings = list(_findings(context))
        failed = [finding for finding in findings if finding.level == "fail"]
        console = context.console
        if console.json:
            report: dict[str, Any] = {"ok": not failed, "findings": [finding.as_dict() for finding in findings]}
            if failed:
                message = "; ".join(f"{finding.check}: {finding.message}" for finding in failed)
                report["error"] = {"code": REFUSED, "message": message, "data": {"kind": "unhealthy"}}
            console.document(report)
        else:
            for finding in findings:
                console.line(f"{finding.level:<4}  {finding.check:<8}  {finding.message}")
                if finding.advice:
                    console.line(f"{'':<16}{finding.advice}")
        return REFUSED if failed else DONE


def _findings(context: Context) -> Iterator[Finding]:
    yield check_home(context.paths)
    yield from check_socket(context.paths)
    yield from check_settings_and_disk(context)
    yield from check_packages()
    yield from check_wired_limit(context)
    health = service_health(context)
    yield from check_service(context, health)
    waits = isinstance(health, Health) and health.waits  # who asks there would start the daemon
    if not waits:
        yield from check_lock(context)
    yield from check_daemon(context, health)
