"""What several tests share; ``README.md`` has a line for each module."""
