"""Make frequent reads cheap, with the parts of ``batchwright_service.fast_path``.

``coalesced`` defines the reads that concurrent callers share; ``row_streams`` sends whole lists, read page by page.
"""
