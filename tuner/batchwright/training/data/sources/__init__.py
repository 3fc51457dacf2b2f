"""Read one kind of training data per module, as samples with random access.

``text`` reads files as one stream of tokens, ``records`` rows (``rows`` reads the files, ``tokens`` makes token ids,
``packing`` fills sequences), and ``pair_records`` rows with two completions; ``images`` a folder per class, ``arrays``
tensors in a file, ``workload_samples`` the workload's own samples. Nothing is downloaded.
"""
