"""`python -m omlxd.daemon` is `omlxd`: what launchd starts, with the virtual environment's own Python."""

from omlxd.daemon.main import main

main()
