"""What the tests of the service share."""
