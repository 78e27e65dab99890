"""The player inside locust, which gives it processes, messages and a web UI. Nothing else imports locust.

Locust's users, wait times and spawn rates time nothing here, and its statistics judge nothing: they are fed so that
its UI shows the traffic.
"""

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import gevent
import locust
from locust.runners import MasterRunner, WorkerRunner

from harness import parent
from harness.drivers.process import RUN_DIR
from harness.drivers.roles import STOP_LIMIT_S, Alone, Master, Worker

_events: Any = locust.events


class Plan(locust.User):
    """What locust calls a user: present while the plan is played, and of no consequence."""

    wait_time = locust.constant(0)

    @locust.task
    def play(self) -> None:
        gevent.sleep(60)


def _take_a_role(environment: Any, runner: Any, **_: Any) -> None:
    run_dir = Path(os.environ[RUN_DIR]) if RUN_DIR in os.environ else None
    role: Alone
    if isinstance(runner, WorkerRunner):
        role = Worker(environment, run_dir)
    elif run_dir is None:
        sys.exit(f"{RUN_DIR} must name a run directory")
    else:
        role = (Master if isinstance(runner, MasterRunner) else Alone)(environment, run_dir)
    if isinstance(role, Worker):
        if run_dir is not None:
            parent.die_with(_master())
    else:
        parent.die_with(parent.conductor())
    gevent.signal_handler(signal.SIGINT, os.kill, os.getpid(), signal.SIGTERM)  # one way to end, whoever asks
    environment.events.test_start.add_listener(lambda **_: gevent.spawn(_run, role))
    environment.events.quitting.add_listener(lambda **_: _end(role))


def _run(role: Alone) -> None:
    """Run a role to its end, then end this process: 0 when the plan was played or we were asked, 1 when we failed."""
    environment, role.started = role.environment, True
    environment.process_exit_code = 1
    try:
        role.run()
        environment.process_exit_code = 0
    except Exception:  # in a greenlet it would end nothing: the process must, with 1
        traceback.print_exc()
    finally:
        role.over.set()
    if not role.leaving and not isinstance(role, Worker):  # a master ends its workers
        environment.runner.quit()
        if environment.web_ui:
            environment.web_ui.stop()


def _end(role: Alone) -> None:
    """Asked to end: let the role write everything first."""
    role.leaving = True
    if role.started:
        role.ask()
        role.over.wait(STOP_LIMIT_S)


def _master() -> int:
    """The pid of the master that forked this worker; 0, which is nobody's, when it is gone and another adopted us."""
    return os.getppid() if os.getpgid(os.getppid()) == os.getpgid(0) else 0


_events.init.add_listener(_take_a_role)
