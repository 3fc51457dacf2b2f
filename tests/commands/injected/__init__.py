"""Tests of the code that runs inside the processes of a command."""
