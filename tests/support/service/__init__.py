"""Support for the tests of the service."""
