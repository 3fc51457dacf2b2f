"""``python -m batchwright``: the command line without its installed script."""

from batchwright.cli.main import main

main()
