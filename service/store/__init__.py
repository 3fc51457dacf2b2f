"""Where work, evidence and answers are kept. ``base`` is the interface, ``sql`` the implementation."""
