"""What a recommendation warns of, and why nothing fits. Pure, no torch.

``tuning_warnings`` lists the warnings of a finished tuning; those that only commands have are in ``command_warnings``.
``infeasibility`` explains why not even the smallest micro-batch fits.

Where a new warning goes: ``command_warnings`` where only commands can have it, else ``tuning_warnings``.
"""
