"""Make the reads that many callers repeat cheap.

``coalescing`` makes equal reads that arrive at the same time once; ``coalesced`` lists the reads that are made so;
``fast_path`` lets the busiest routes answer requests of the usual shape without the framework's parsing.
"""
