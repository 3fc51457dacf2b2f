"""Make the reads that many callers repeat cheap, with the parts of ``service.fast_path``.

``coalesced`` lists the reads of which equal ones are made once; ``fast_path`` lets the busiest routes answer requests
of the usual shape without the framework's parsing.
"""
