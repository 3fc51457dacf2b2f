"""The pages for people. The data on them come from the public API, in the browser."""
