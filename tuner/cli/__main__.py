"""``python -m tuner.cli``: the command line without its installed script."""

from tuner.cli.entry import main

main()
