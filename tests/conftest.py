"""What holds for every test."""

from __future__ import annotations

import signal

# A shell starts background commands with SIGINT ignored, and what a test starts would inherit that: Ctrl-C would reach
# nobody. With a handler of its own here, every process that a test starts begins with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
