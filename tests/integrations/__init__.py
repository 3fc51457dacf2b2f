"""Tests of the callbacks, against the trainers themselves."""
