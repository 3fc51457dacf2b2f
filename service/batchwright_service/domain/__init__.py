"""Define the values and rules of the service that no document of the API holds. Pure data.

- ``callers``: who sends a request, and what each caller may do. ``key_texts``: the texts of API keys and their digests.
- ``conditions``: whether a stored recommendation still holds on the devices that are served.
- ``hardware``: the hardware that work needs. ``identifiers``: ids that sort by their time.
- ``lease_waits``: how long is waited at most, from the start of a worker to the end of its work.

Where a new thing goes: what a response or the SDK has, ``batchwright.client.documents``; a pure rule of several
layers, here. The package may import ``batchwright``, but neither an HTTP framework nor a database.
"""
