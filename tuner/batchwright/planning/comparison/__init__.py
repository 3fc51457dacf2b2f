"""Compare the plan that was found with others: the one in use until now, and those of a changed spec. Pure, no torch.

``gain`` says what the recommended plan gains over the baseline of the request, by what the probes show of both.
``what_if`` estimates which changes of the spec would let a larger micro-batch fit.
"""
