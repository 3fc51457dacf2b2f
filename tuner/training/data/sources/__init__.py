"""Read one kind of training data per module, as samples with random access.

``text`` reads files as one stream of tokens, ``records`` rows (``rows`` reads the files, ``tokens`` makes token ids),
``images`` a folder per class, ``arrays`` tensors in a file, ``own`` what the workload makes. ``packages`` names the
extra that a kind of data needs. Nothing is downloaded.
"""
