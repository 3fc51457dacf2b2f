"""``python -m batchwright``: the command line without its installed script."""

from batchwright.cli.entry import main

main()
